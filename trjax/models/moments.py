"""Batch normalisation as functions with gradients of their own: of an array, and of a 1x1 convolution's result.

Moments are taken over the real examples of a block, and over those of all devices if they are shared. The work is
bound by memory traffic, so what counts is how often an array is read and written.

Source of the gradients: Ioffe and Szegedy, "Batch Normalization", 2015.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

EPSILON = 1e-5
"""Added to the variance before the square root; one value for all layers, so that folding needs only trees."""

ReduceMoments = Callable[[jax.Array], jax.Array]
"""Sums a float32 vector over all devices, `collectives.sum_moments`."""
Result = tuple[jax.Array, jax.Array, jax.Array]
"""The normalised array, and the mean and unbiased variance of the real examples; the old ones if there are none."""


class NormInputs(NamedTuple):
    """What normalising takes beside an array and its parameters, float32; none of it has a gradient.

    Attributes:
        mask: 1 for real examples, 0 for padding, shape (examples,).
        mean: running mean, shape (channels,) of the result.
        var: running variance, likewise.
    """

    mask: jax.Array
    mean: jax.Array
    var: jax.Array


class Moments(NamedTuple):
    """What an array is normalised with, float32, shape (channels,), but for the count.

    Attributes:
        mean: of the real examples.
        unbiased: their variance as an estimate of the data's.
        inverse: one by their deviation.
        num_values: per channel, at least 1; shape (1,).
    """

    mean: jax.Array
    unbiased: jax.Array
    inverse: jax.Array
    num_values: jax.Array


def per_channel(leaf: jax.Array, x: jax.Array) -> jax.Array:
    """Returns a vector of channels with the rank of `x`."""
    return leaf.reshape(*[1] * (x.ndim - 1), -1)


def _per_example(leaf: jax.Array, x: jax.Array) -> jax.Array:
    return leaf.reshape(-1, *[1] * (x.ndim - 1))


def _sum_pair(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the sums over all dims but the last: in one pass, and one kernel that finishes both.

    On the CPU runs of up to eight neighbouring pixels first: so short a sum is unrolled, and channels fill a vector.
    """
    pixels, channels = math.prod(first.shape[1:-1]), first.shape[-1]
    run = max(run for run in range(1, 9) if pixels % run == 0)

    def plain(*pair: jax.Array) -> jax.Array:
        return jnp.concatenate([x.sum(tuple(range(1, x.ndim - 1))) for x in pair], 1).sum(0)

    def by_runs(*pair: jax.Array) -> jax.Array:
        runs = [x.reshape(len(x), pixels // run, run, channels).sum(2) for x in pair]
        return jnp.concatenate(runs, 2).sum(1).sum(0)

    sums: jax.Array = lax.platform_dependent(first, second, cpu=by_runs if run > 1 else plain, default=plain)
    return sums[:channels], sums[channels:]


def _count(given: NormInputs, x: jax.Array) -> jax.Array:
    """Returns the real values of a channel, shape (1,)."""
    return given.mask.sum(keepdims=True) * math.prod(x.shape[1:-1])


def _share(reduce_moments: ReduceMoments | None, *vectors: jax.Array) -> list[jax.Array]:
    """Returns vectors summed over the devices, if they share them; all in one AllReduce."""
    if reduce_moments is None:
        return list(vectors)
    ends = list(accumulate(map(len, vectors)))
    return jnp.split(reduce_moments(jnp.concatenate(vectors)), ends[:-1])


def _finish_moments(reduce_moments: ReduceMoments | None, sums: tuple[jax.Array, ...], given: NormInputs) -> Moments:
    """Returns the moments, from count and sums of what deviates from the old running mean and of its square.

    That mean is the same on all devices: the difference of squares then cancels little, and sums add up.
    """
    count, deviation, square = _share(reduce_moments, *sums)
    safe_count, some = jnp.maximum(count, 1), count > 0
    shift = deviation / safe_count
    var = jnp.maximum(square / safe_count - shift**2, 0)
    unbiased = jnp.where(some, var * (safe_count / jnp.maximum(count - 1, 1)), given.var)
    inverse = lax.rsqrt(jnp.where(some, var, given.var) + EPSILON)
    return Moments(given.mean + shift, unbiased, inverse, safe_count)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def normalise(
    reduce_moments: ReduceMoments | None,
    rectified: bool,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    given: NormInputs,
) -> Result:
    """Normalises an array: one pass over it for the moments, one for the result; backward two with the cotangent.

    Args:
        reduce_moments: shares the moments over the devices.
        rectified: what is negative in the result becomes 0.
        x: shape (examples, ..., channels).
        scale: float32, shape (channels,).
        bias: likewise.
        given: mask and running statistics.
    """
    return _normalise_forward(reduce_moments, rectified, x, scale, bias, given)[0]


def _normalise_forward(
    reduce_moments: ReduceMoments | None,
    rectified: bool,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    given: NormInputs,
) -> tuple[Result, tuple[jax.Array, ...]]:
    x32, weights = x.astype(jnp.float32), _per_example(given.mask, x)
    offset = x32 - per_channel(given.mean, x)
    sums = _count(given, x), *_sum_pair(offset * weights, offset * offset * weights)
    mean, unbiased, inverse, count = _finish_moments(reduce_moments, sums, given)
    y = (x32 - per_channel(mean, x)) * per_channel(inverse * scale, x) + per_channel(bias, x)
    y = jnp.maximum(y, 0) if rectified else y
    return (y.astype(x.dtype), mean, unbiased), (x, scale, bias, mean, inverse, _per_example(given.mask / count, x))


def _normalise_backward(
    reduce_moments: ReduceMoments | None,
    rectified: bool,
    saved: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
) -> tuple[jax.Array | None, ...]:
    """One pass over `x` and `dy` for their two sums, one for `dx`. The new statistics have no gradient."""
    x, scale, bias, mean, inverse, share = saved
    dy, factor = cotangents[0].astype(jnp.float32), per_channel(inverse * scale, x)
    centred = x.astype(jnp.float32) - per_channel(mean, x)
    if rectified:  # not in the forward's words: the compiler would compute it there, and write it down for both passes
        least = per_channel(mean * (inverse * scale) - bias, x)
        dy = jnp.where(x.astype(jnp.float32) * factor > least, dy, 0)
    dbias, moment = _sum_pair(dy, dy * centred)
    total, total_moment = _share(reduce_moments, dbias, moment)
    through_statistics = per_channel(total, x) + centred * per_channel(total_moment * inverse**2, x)
    dx = (dy - share * through_statistics) * factor
    return dx.astype(x.dtype), moment * inverse, dbias, None


normalise.defvjp(_normalise_forward, _normalise_backward)


def _multiply(x: jax.Array, kernel: jax.Array, precision: Any) -> jax.Array:
    """Returns the 1x1 convolution of images; the kernel, shape (channels, features), takes their dtype."""
    dims = ("NHWC", "HWIO", "NHWC")
    kernel = kernel[None, None].astype(x.dtype)
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=dims, precision=precision)


def _correlate(x: jax.Array, y: jax.Array, precision: Any) -> jax.Array:
    """Returns the sums over all pixels of products of channels: float32, shape (channels of x, channels of y)."""
    pixels = tuple(range(x.ndim - 1))
    dims = (pixels, pixels), ((), ())
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _total(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32).sum(tuple(range(1, x.ndim - 1))).sum(0)


_small = partial(jnp.dot, precision=lax.Precision.HIGHEST)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def convolve_and_normalise(
    reduce_moments: ReduceMoments | None,
    precision: Any,
    x: jax.Array,
    kernel: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    given: NormInputs,
) -> Result:
    """Convolves images with a 1x1 kernel and normalises the result, which itself is neither written nor read.

    Mean and variance of x @ kernel are the kernel's product with the mean of x, and its quadratic form with the
    covariance of x; both gradients follow from these and from the correlation of x with the cotangent. Where there
    are more features than channels, that is less to move. Padding gives some constant. The variance is a difference of
    float32 sums, whose error grows with the square of mean over deviation of `x`: nothing after a ReLU, 2e-3 at 30.

    Args:
        reduce_moments: shares the moments over the devices.
        precision: of the products of images, but for the covariance, which is never rounded to TF32.
        x: shape (examples, height, width, channels).
        kernel: float32, shape (channels, features).
        scale: float32, shape (features,).
        bias: likewise.
        given: mask and running statistics.
    """
    return _convolve_forward(reduce_moments, precision, x, kernel, scale, bias, given)[0]


def _convolve_forward(
    reduce_moments: ReduceMoments | None,
    precision: Any,
    x: jax.Array,
    kernel: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    given: NormInputs,
) -> tuple[Result, tuple[Any, ...]]:
    x = x * _per_example(given.mask, x).astype(x.dtype)
    count, total = _count(given, x), _total(x)
    # The barrier has `x` written, as the convolution needs it anyway. Without it, XLA 0.10 also computes `x` inside of
    # the products of channels, and aborts on the strides of a slice in there (tests/test_compiles.py).
    x = lax.optimization_barrier(x)
    centre = total / jnp.maximum(count, 1)
    covariance = _correlate(x, x, lax.Precision.HIGHEST) - jnp.outer(total, centre)
    products, own_mean = _small(covariance, kernel), (centre[:, None] * kernel).sum(0)
    shift = own_mean - given.mean
    sums = count, count * shift, (kernel * products).sum(0) + count * shift**2
    moments = _finish_moments(reduce_moments, sums, given)
    factor = moments.inverse * scale
    weights = (kernel * factor[None]).astype(x.dtype)
    # What is multiplied is rounded, and its mean is what must be taken off. The bias takes the images' type, or the
    # compiler would not make it, the shortcut and ReLU part of the convolution.
    offset = bias - (centre[:, None] * weights.astype(jnp.float32)).sum(0) + (own_mean - moments.mean) * factor
    y = _multiply(x, weights, precision) + per_channel(offset, x).astype(x.dtype)
    saved = (x, kernel, scale, given.mask, moments, total, products, own_mean)
    return (y, moments.mean, moments.unbiased), saved


def _convolve_backward(
    reduce_moments: ReduceMoments | None, precision: Any, saved: tuple[Any, ...], cotangents: tuple[jax.Array, ...]
) -> tuple[jax.Array | None, ...]:
    """With z = x @ kernel, the gradient of z is a dy + b z + c, channel by channel; z need not be there for it."""
    x, kernel, scale, mask, moments, total, products, own_mean = saved
    dy = cotangents[0]
    correlation, dbias = _correlate(x, dy, precision), _total(dy)
    moment = (kernel * correlation).sum(0) - moments.mean * dbias
    by_mean, by_deviation = _share(reduce_moments, dbias, moment)
    factor = moments.inverse * scale
    constant = -factor * by_mean / moments.num_values
    slope = -factor * moments.inverse**2 * by_deviation / moments.num_values
    dkernel = correlation * factor[None] + products * slope[None]
    dkernel += jnp.outer(total, constant + slope * (own_mean - moments.mean))
    offset = (kernel * (constant - slope * moments.mean)[None]).sum(1)
    through_statistics = _multiply(x, _small(kernel * slope[None], kernel.T), precision)
    through_statistics += per_channel(offset, x).astype(x.dtype)
    dx = _multiply(dy, (kernel * factor[None]).T, precision) + through_statistics
    dx *= _per_example(mask, x).astype(x.dtype)
    return dx, dkernel, moment * moments.inverse, dbias, None


convolve_and_normalise.defvjp(_convolve_forward, _convolve_backward)


def saves_traffic(shape: Sequence[int], features: int) -> bool:
    """Tells whether `convolve_and_normalise` saves more memory traffic than it costs, for images of a shape.

    There must be more features than channels, and many more pixels: products of channels take the place of images.
    """
    return features > shape[-1] and math.prod(shape[:-1]) >= 8 * shape[-1]
