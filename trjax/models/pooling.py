"""What makes images smaller: max-pooling, and the blur that keeps strides from aliasing.

Source of the blur: Zhang, "Making Convolutional Networks Shift-Invariant Again", 2019.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_SIDE, _PAD = 3, 1


def blur(x: jax.Array) -> jax.Array:
    """Returns `x` under a binomial filter of 3x3, edges repeated: what is then strided does not alias."""
    for axis in (1, 2):
        size = x.shape[axis]
        padded = jnp.pad(x, [(int(dim == axis),) * 2 for dim in range(4)], mode="edge")
        before, middle, after = (lax.slice_in_dim(padded, at, at + size, axis=axis) for at in range(3))
        x = 0.25 * before + 0.5 * middle + 0.25 * after
    return x


def _places(stride: int, x: jax.Array) -> Iterator[jax.Array]:
    """Yields the pixels at each place of the windows, row by row."""
    padded = jnp.pad(x, ((0, 0), (_PAD, _PAD), (_PAD, _PAD), (0, 0)), constant_values=-jnp.inf)
    height, width = padded.shape[1:3]
    for row, column in np.ndindex(_SIDE, _SIDE):
        stop = (len(x), height - _SIDE + row + 1, width - _SIDE + column + 1, x.shape[-1])
        yield lax.slice(padded, (0, row, column, 0), stop, (1, stride, stride, 1))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def max_pool(x: jax.Array, stride: int) -> jax.Array:
    """Returns the maxima of windows of 3x3 around every `stride`-th pixel; beyond the edges is nothing.

    The gradient goes to the first of equal pixels, in the order of rows, as XLA's and cuDNN's does. Each pixel gathers
    it from the windows that it is in, which remember the place of their maximum in a byte: nothing is scattered, and
    the sum has one order.

    Args:
        x: images of a floating type, shape (examples, height, width, channels).
        stride: between windows.
    """
    return _max_pool_forward(x, stride)[0]


def _max_pool_forward(x: jax.Array, stride: int) -> tuple[jax.Array, tuple[jax.Array, tuple[int, ...]]]:
    first, *others = _places(stride, x)
    best, place = first, jnp.zeros(first.shape, jnp.uint8)
    for index, other in enumerate(others, start=1):
        above = (other > best) | jnp.isnan(other)
        best, place = jnp.where(above, other, best), jnp.where(above, jnp.uint8(index), place)
    return best, (place, x.shape[1:3])


def _windows(place: int, stride: int) -> list[tuple[int, int]]:
    """Returns the windows that a pixel is in, along one axis, in order: its offset in each, and how far on that is.

    Args:
        place: of the pixel, counted from a window's centre.
        stride: between windows.
    """
    return [(at, (place + _PAD - at) // stride) for at in reversed(range(_SIDE)) if (place + _PAD - at) % stride == 0]


def _max_pool_backward(stride: int, saved: tuple[jax.Array, tuple[int, ...]], dy: jax.Array) -> tuple[jax.Array]:
    place, (height, width) = saved
    none = jnp.zeros((), dy.dtype)

    def gather(row: int, column: int) -> jax.Array:
        total = jnp.zeros_like(dy)
        for (up, down), (left, right) in product(_windows(row, stride), _windows(column, stride)):
            own = jnp.where(place == _SIDE * up + left, dy, 0)
            total += lax.pad(own, none, [(0, 0, 0), (-down, down, 0), (-right, right, 0), (0, 0, 0)])
        return total

    rows = [jnp.stack([gather(row, column) for column in range(stride)], 3) for row in range(stride)]
    dx = jnp.stack(rows, 2).reshape(len(dy), stride * dy.shape[1], stride * dy.shape[2], dy.shape[3])
    return (dx[:, :height, :width],)


max_pool.defvjp(_max_pool_forward, _max_pool_backward)
