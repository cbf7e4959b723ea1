"""Batch normalisation that ignores padding, can share its moments between devices, and folds away.

Source: Ioffe and Szegedy, "Batch Normalization", 2015.
"""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Initializer

EPSILON = 1e-5
"""Added to the variance before the square root; one value for all layers, so that folding needs only trees."""


def _per_channel(leaf: jax.Array, x: jax.Array) -> jax.Array:
    """Returns a vector of channels with the rank of `x`."""
    return leaf.reshape(*[1] * (x.ndim - 1), -1)


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
    reduce_moments: Callable[[jax.Array], jax.Array] | None = None

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
            mean, var, unbiased_var = self._batch_statistics(x32, mask, mean, var)
            running_mean.value += (1 - self.momentum) * (mean - running_mean.value)
            running_var.value += (1 - self.momentum) * (unbiased_var - running_var.value)
        factor = scale * jax.lax.rsqrt(var + EPSILON)
        return ((x32 - _per_channel(mean, x)) * _per_channel(factor, x) + bias_all).astype(x.dtype)

    def _batch_statistics(
        self, x: jax.Array, mask: jax.Array, old_mean: jax.Array, old_var: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns mean, biased and unbiased variance of the real examples; the old ones if there are none.

        One pass over `x`. The moments are taken about the old running mean, which is the same on all devices:
        the difference of squares then cancels little, and the moments of all devices add up.
        """
        dims = tuple(range(x.ndim - 1))
        weights = mask.reshape(-1, *[1] * (x.ndim - 1))
        offset = x - _per_channel(old_mean, x)
        centred = offset * weights
        count = mask.sum(keepdims=True) * math.prod(x.shape[1:-1])
        moments = jnp.concatenate([count, centred.sum(dims), (centred * offset).sum(dims)])
        if self.reduce_moments is not None:
            moments = self.reduce_moments(moments)
        count, first, second = moments[0], *jnp.split(moments[1:], 2)
        some, safe_count = count > 0, jnp.maximum(count, 1)
        shift = first / safe_count
        var = jnp.maximum(second / safe_count - shift**2, 0)
        unbiased = var * (safe_count / jnp.maximum(count - 1, 1))
        return old_mean + shift, jnp.where(some, var, old_var), jnp.where(some, unbiased, old_var)


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
