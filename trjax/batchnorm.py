"""Batch normalisation that ignores padding, can share its moments between devices, and folds away.

Source: Ioffe and Szegedy, "Batch Normalization", 2015.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Initializer

EPSILON = 1e-5
"""Added to the variance before the square root; one value for all layers, so that folding needs only trees."""


Reduce = Callable[[jax.Array], jax.Array]
"""Sums a float32 vector over all devices, `collectives.sum_moments`."""


def _per_channel(leaf: jax.Array, x: jax.Array) -> jax.Array:
    """Returns a vector of channels with the rank of `x`."""
    return leaf.reshape(*[1] * (x.ndim - 1), -1)


def _sum_pair(first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns the sums over all dims but the last, one behind the other: one pass, and one kernel to finish it."""
    spatial = tuple(range(1, first.ndim - 1))
    return jnp.concatenate([first.sum(spatial), second.sum(spatial)], 1).sum(0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalise(
    reduce_moments: Reduce | None,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    mask: jax.Array,
    old_mean: jax.Array,
    old_var: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the output, and mean and unbiased variance of the real examples; the old ones if there are none.

    One pass over `x` for the moments, one for the output. The moments are taken about the old running mean,
    which is the same on all devices: the difference of squares then cancels little, and the moments of all
    devices add up.
    """
    return _normalise_forward(reduce_moments, x, scale, bias, mask, old_mean, old_var)[0]


def _normalise_forward(
    reduce_moments: Reduce | None,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    mask: jax.Array,
    old_mean: jax.Array,
    old_var: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, ...]]:
    x32, weights = x.astype(jnp.float32), mask.reshape(-1, *[1] * (x.ndim - 1))
    offset = x32 - _per_channel(old_mean, x)
    count = mask.sum(keepdims=True) * math.prod(x.shape[1:-1])
    sums = _sum_pair(offset * weights, offset * offset * weights)
    if reduce_moments is not None:
        count, sums = jnp.split(reduce_moments(jnp.concatenate([count, sums])), [1])
    safe_count = jnp.maximum(count, 1)
    shift, square = jnp.split(sums / safe_count, 2)
    var = jnp.maximum(square - shift**2, 0)
    unbiased = var * (safe_count / jnp.maximum(count - 1, 1))
    mean, some = old_mean + shift, count > 0
    inverse = jax.lax.rsqrt(jnp.where(some, var, old_var) + EPSILON)
    y = (x32 - _per_channel(mean, x)) * _per_channel(inverse * scale, x) + _per_channel(bias, x)
    saved = (x, scale, mean, inverse, (mask / safe_count).reshape(weights.shape))
    return (y.astype(x.dtype), mean, jnp.where(some, unbiased, old_var)), saved


def _normalise_backward(
    reduce_moments: Reduce | None, saved: tuple[jax.Array, ...], cotangents: tuple[jax.Array, ...]
) -> tuple[jax.Array | None, ...]:
    """One pass over `x` and `dy` for their two sums, one for `dx`. The new statistics have no gradient."""
    x, scale, mean, inverse, share = saved
    dy = cotangents[0].astype(jnp.float32)
    centred = x.astype(jnp.float32) - _per_channel(mean, x)
    sums = _sum_pair(dy, dy * centred)
    dbias, moment = jnp.split(sums, 2)
    if reduce_moments is not None:
        sums = reduce_moments(sums)
    total, total_moment = jnp.split(sums, 2)
    through_statistics = _per_channel(total, x) + centred * _per_channel(total_moment * inverse**2, x)
    dx = (dy - share * through_statistics) * _per_channel(inverse * scale, x)
    return dx.astype(x.dtype), moment * inverse, dbias, None, None, None


_normalise.defvjp(_normalise_forward, _normalise_backward)


class BatchNorm(nn.Module):
    """Normalises each channel over the real examples of the batch, then scales and shifts it.

    Parameters `scale` and `bias`, statistics `running_mean` and `running_var`: float32, shape (channels,).
    The running variance is the unbiased one (as in cuDNN and PyTorch), so that small local batches do not
    shrink it. A block in which every example is padding normalises with the running statistics and keeps them.

    Attributes:
        momentum: weight of the old running statistics in the new ones.
        scale_init: initial scale; zero in the last normalisation of a residual block.
        reduce_moments: sums a float32 vector over all devices (`collectives.sum_moments`) to normalise with
            the statistics of the global batch; None normalises each device's block by itself.
    """

    momentum: float = 0.9
    scale_init: Initializer = nn.initializers.ones
    reduce_moments: Reduce | None = None

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array) -> jax.Array:
        """Normalises `x`, shape (examples, ..., channels), in float32, and returns its dtype."""
        shape = (x.shape[-1],)
        scale = self.param("scale", self.scale_init, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32)
        x32 = x.astype(jnp.float32)
        scale_all, bias_all = (_per_channel(leaf, x) for leaf in (scale, bias))
        if not (train or self.is_initializing() or self.has_variable("batch_stats", "running_mean")):
            return (x32 * scale_all + bias_all).astype(x.dtype)  # folded: `fold_batchnorm` left no statistics

        running_mean = self.variable("batch_stats", "running_mean", jnp.zeros, shape)
        running_var = self.variable("batch_stats", "running_var", jnp.ones, shape)
        mean, var = running_mean.value, running_var.value
        if train:
            y, mean, var = _normalise(self.reduce_moments, x, scale, bias, mask, mean, var)
            running_mean.value += (1 - self.momentum) * (mean - running_mean.value)
            running_var.value += (1 - self.momentum) * (var - running_var.value)
            return y
        factor = scale * jax.lax.rsqrt(var + EPSILON)
        return ((x32 - _per_channel(mean, x)) * _per_channel(factor, x) + bias_all).astype(x.dtype)


def fold_batchnorm(params: Any, batch_stats: Any) -> tuple[Any, Any]:
    """Folds running statistics into one scale and one bias per channel, for evaluation and export.

    A `BatchNorm` is known by its statistic's name, `running_mean`; other modules' statistics stay as they are.

    Returns:
        Parameters in which `scale = scale / sqrt(var + EPSILON)` and `bias = bias - mean * scale`, and the
        statistics that remain: none of `BatchNorm`'s.
    """
    if "running_mean" in batch_stats:
        scale = params["scale"] * jax.lax.rsqrt(batch_stats["running_var"] + EPSILON)
        return {"scale": scale, "bias": params["bias"] - batch_stats["running_mean"] * scale}, {}
    folded, rest = dict(params), {}
    for name, stats in batch_stats.items():
        if isinstance(stats, dict) and name in params:
            folded[name], stats = fold_batchnorm(params[name], stats)
        if not isinstance(stats, dict) or stats:
            rest[name] = stats
    return folded, rest
