"""Convolutions of a train step; their gradients are written so that XLA computes them fast on CPUs.

XLA computes a filter gradient as a convolution over the batch of what it transposes first. On the CPU it fuses the
transpose with what computes its input, and then computes all of that in an order that no cache likes; and it has no
fast convolution of an input with holes, as the gradient of a strided one is, nor of images smaller than the kernel.
Source of the rules: Dumoulin and Visin, "A guide to convolution arithmetic for deep learning", 2016.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_DIMS = ("NHWC", "HWIO", "NHWC")
_FEW = 3  # pixels of a kernel's side up to which smaller images are multiplied
Pair = tuple[int, int]


def _transpose(x: jax.Array, order: Sequence[int]) -> jax.Array:
    """Transposes in a branch of its own, into which XLA fuses nothing; both branches are the same."""
    transpose = partial(lax.transpose, permutation=order)
    transposed: jax.Array = lax.cond(x[(0,) * x.ndim] > 0, transpose, transpose, x)
    return transposed


def _convolve_plain(
    x: jax.Array, kernel: jax.Array, strides: Pair, padding: Sequence[Pair], precision: Any
) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=_DIMS, precision=precision)


def _multiply(x: jax.Array, kernel: jax.Array, strides: Pair, padding: Sequence[Pair], precision: Any) -> jax.Array:
    """Convolves as one product: of images and a matrix from all their pixels to all pixels of the result."""
    sizes = zip(x.shape[1:3], padding, kernel.shape[:2], strides, strict=True)
    height, width = ((size + sum(pads) - side) // stride + 1 for size, pads, side, stride in sizes)
    none = jnp.zeros(kernel.shape[2:], kernel.dtype)

    def weights(pixel: tuple[int, ...], result: tuple[int, ...]) -> jax.Array:
        at = [a - b * stride + pads[0] for a, b, stride, pads in zip(pixel, result, strides, padding, strict=True)]
        inside = all(0 <= place < side for place, side in zip(at, kernel.shape, strict=False))
        return kernel[at[0], at[1]] if inside else none

    rows = [[weights(pixel, result) for result in np.ndindex(height, width)] for pixel in np.ndindex(x.shape[1:3])]
    product = jnp.dot(x.reshape(len(x), -1), jnp.block(rows), precision=precision)
    return product.reshape(len(x), height, width, -1)


def _convolve_fast(
    x: jax.Array, kernel: jax.Array, strides: Pair, padding: Sequence[Pair], precision: Any
) -> jax.Array:
    """Convolves; images smaller than the kernel as a product: XLA exchanges the two, which is slow on the CPU."""
    if all(size < side <= _FEW for size, side in zip(x.shape[1:3], kernel.shape, strict=False)):
        return _multiply(x, kernel, strides, padding, precision)
    return _convolve_plain(x, kernel, strides, padding, precision)


def _dilate(x: jax.Array, strides: Pair, behind: Sequence[int] = (0, 0)) -> jax.Array:
    """Puts zeros between the pixels, as many as a stride skips, and behind the last ones."""
    holes = [(0, more, stride - 1) for more, stride in zip(behind, strides, strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *holes, (0, 0, 0)])


def _input_gradient(
    cotangent: jax.Array, kernel: jax.Array, size: Sequence[int], strides: Pair, padding: Sequence[Pair], precision: Any
) -> jax.Array:
    """Returns a convolution's gradient of its input, of this size: convolved with the kernel turned by a half."""
    apart = _dilate(cotangent, strides) if max(strides) > 1 else cotangent
    sizes = zip(size, apart.shape[1:3], kernel.shape[:2], padding, strict=True)
    pads = [(window - 1 - before, whole - own + before) for whole, own, window, (before, _) in sizes]
    turned = kernel[::-1, ::-1].transpose(0, 1, 3, 2)
    return _convolve_fast(apart, turned, (1, 1), pads, precision)


def _filter_gradient(
    x: jax.Array, cotangent: jax.Array, window: Sequence[int], strides: Pair, padding: Sequence[Pair], precision: Any
) -> jax.Array:
    """Returns a convolution's gradient of its kernel: channels are its examples, and examples its channels."""
    sizes = zip(x.shape[1:3], cotangent.shape[1:3], window, strides, padding, strict=True)
    pads = [(before, (own - 1) * stride + side - size - before) for size, own, side, stride, (before, _) in sizes]
    images, kernels = _transpose(x, (3, 1, 2, 0)), _transpose(cotangent, (1, 2, 0, 3))
    options = {"rhs_dilation": strides, "dimension_numbers": _DIMS, "precision": precision}
    swapped = lax.conv_general_dilated(images, kernels, (1, 1), pads, **options)
    return swapped.transpose(1, 2, 0, 3)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _convolve(x: jax.Array, kernel: jax.Array, strides: Pair, padding: tuple[Pair, Pair], precision: Any) -> jax.Array:
    fast = partial(_convolve_fast, strides=strides, padding=padding, precision=precision)
    ordinary = partial(_convolve_plain, strides=strides, padding=padding, precision=precision)
    convolved: jax.Array = lax.platform_dependent(x, kernel, cpu=fast, default=ordinary)
    return convolved


def _convolve_forward(
    x: jax.Array, kernel: jax.Array, strides: Pair, padding: tuple[Pair, Pair], precision: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _convolve(x, kernel, strides, padding, precision), (x, kernel)


def _convolve_backward(
    strides: Pair, padding: tuple[Pair, Pair], precision: Any, saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def own(x: jax.Array, kernel: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        window, size, steps = kernel.shape[:2], x.shape[1:3], strides
        if skips := window == (1, 1) and max(strides) > 1:  # of what is skipped, nothing takes part
            x, size, steps = x[:, :: strides[0], :: strides[1]], cotangent.shape[1:3], (1, 1)
        by_input = _input_gradient(cotangent, kernel, size, steps, padding, precision)
        by_kernel = _filter_gradient(x, cotangent, window, steps, padding, precision)
        if skips:
            behind = [(whole - 1) % stride for whole, stride in zip(saved[0].shape[1:3], strides, strict=True)]
            by_input = _dilate(by_input, strides, behind)
        return by_input, by_kernel

    def ordinary(x: jax.Array, kernel: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        convolve = partial(_convolve_plain, strides=strides, padding=padding, precision=precision)
        _, pull = jax.vjp(convolve, x, kernel)
        return pull(cotangent)

    gradients: tuple[jax.Array, jax.Array] = lax.platform_dependent(*saved, cotangent, cpu=own, default=ordinary)
    return gradients


_convolve.defvjp(_convolve_forward, _convolve_backward)


def _is_ordinary(lhs: jax.Array, rhs: jax.Array, padding: Any, rest: dict[str, Any]) -> bool:
    """Returns whether a convolution is of `_DIMS` and has a result, and no dilation, groups or type of its own."""
    if lhs.ndim != 4 or not lhs.size or isinstance(padding, str) or rest.get("preferred_element_type"):
        return False
    own, wanted = (
        lax.conv_dimension_numbers(lhs.shape, rhs.shape, dims) for dims in (rest.get("dimension_numbers"), _DIMS)
    )
    ones = ("lhs_dilation", "rhs_dilation", "feature_group_count", "batch_group_count")
    sizes = zip(lhs.shape[1:3], padding, rhs.shape[:2], strict=True)
    return (
        own == wanted
        and all(rest.get(name) in (None, 1, (1, 1), [1, 1]) for name in ones)
        and all(max(pads) < window <= size + sum(pads) for size, pads, window in sizes)
    )


def convolve(lhs: jax.Array, rhs: jax.Array, window_strides: Sequence[int], padding: Any, **rest: Any) -> jax.Array:
    """Convolves images, shape (examples, height, width, channels), as `lax.conv_general_dilated` does, for `flax`.

    Gradients are equal to its own to rounding; only reverse mode has them. In `shard_map` both arrays must vary over
    the same axes (`collectives.vary`).

    Args:
        lhs: the images.
        rhs: the kernel, shape (height, width, channels, features).
        window_strides: along height and width.
        padding: before and behind, along both.
        rest: what else it takes; whatever is not ordinary in it, or in the shapes, is left to JAX.
    """
    if not _is_ordinary(lhs, rhs, padding, rest):
        return lax.conv_general_dilated(lhs, rhs, window_strides, padding, **rest)
    strides, pads = (window_strides[0], window_strides[1]), (padding[0], padding[1])
    return _convolve(lhs, rhs, strides, pads, rest.get("precision"))
