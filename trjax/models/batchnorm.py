"""Batch normalisation that ignores padding, can share its moments between devices, and folds away.

Source: Ioffe and Szegedy, "Batch Normalization", 2015.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Initializer

from trjax.models.moments import EPSILON, NormInputs, ReduceMoments, convolve_and_normalise, normalise, per_channel
from trjax.models.rectify import rectify


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
    reduce_moments: ReduceMoments | None = None

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool, mask: jax.Array, kernel: jax.Array | None = None, precision: Any = None,
        rectified: bool = False,
    ) -> jax.Array:  # fmt: skip
        """Normalises in float32, and returns the dtype of `x`.

        Args:
            x: shape (examples, ..., channels).
            train: normalise with the block's moments, and update the running ones; else with the running ones.
            mask: 1 for examples, 0 for padding; float32, shape (examples,).
            kernel: of a 1x1 convolution that `x`, images, still lacks, shape (channels, features); training only.
            precision: of its products.
            rectified: what is negative in the result becomes 0.

        Raises:
            ValueError: a kernel without `train`.
        """
        if kernel is not None and not train:
            raise ValueError("kernel: in training alone; otherwise convolve first")
        shape = (x.shape[-1] if kernel is None else kernel.shape[-1],)
        scale = self.param("scale", self.scale_init, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32)
        x32, factor = x.astype(jnp.float32), scale
        if train or self.is_initializing() or self.has_variable("batch_stats", "running_mean"):
            running_mean = self.variable("batch_stats", "running_mean", jnp.zeros, shape)
            running_var = self.variable("batch_stats", "running_var", jnp.ones, shape)
            mean, var = running_mean.value, running_var.value
            if train:
                given = NormInputs(mask, mean, var)
                if kernel is None:
                    y, mean, var = normalise(self.reduce_moments, rectified, x, scale, bias, given)
                else:
                    y, mean, var = convolve_and_normalise(self.reduce_moments, precision, x, kernel, scale, bias, given)
                    y = rectify(y) if rectified else y
                running_mean.value += (1 - self.momentum) * (mean - running_mean.value)
                running_var.value += (1 - self.momentum) * (var - running_var.value)
                return y
            factor = scale * jax.lax.rsqrt(var + EPSILON)
            x32 -= per_channel(mean, x)
        y = (x32 * per_channel(factor, x) + per_channel(bias, x)).astype(x.dtype)
        return rectify(y) if rectified else y


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
