"""ResNets as chains of segments: a stem, one segment per residual block, a head.

Sources: He et al., "Deep Residual Learning for Image Recognition", 2016 (both families); Goyal et al.,
"Accurate, Large Minibatch SGD", 2017 (stride on the 3x3 convolution, zero-initialised last scale); Huang et al.,
"Deep Networks with Stochastic Depth", 2016.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from trjax.keys import keep_or_drop
from trjax.models.batchnorm import BatchNorm
from trjax.models.convolution import convolve
from trjax.models.moments import ReduceMoments, saves_traffic
from trjax.models.pooling import blur, max_pool
from trjax.models.rectify import rectify

Stem = Literal["imagenet", "cifar"]


_conv_init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


class ConvNorm(nn.Module):
    """A convolution without bias, padded to keep the size at stride 1, then BatchNorm.

    Attributes:
        features: channels of the result.
        kernel: its side.
        stride: of the convolution.
        dtype: to compute in.
        reduce_moments: see `BatchNorm`.
        zero_scale: start with a scale of 0.
        exact: where that is float32, all its digits count in products too; GPUs otherwise take TF32.
        rectified: what is negative in the result becomes 0.
    """

    features: int
    kernel: int
    stride: int = 1
    dtype: jnp.dtype = jnp.dtype("float32")
    reduce_moments: ReduceMoments | None = None
    zero_scale: bool = False
    exact: bool = True
    rectified: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array) -> jax.Array:
        """Returns shape (examples, height / stride, width / stride, features), rounded up."""
        size, pad = (self.kernel, self.kernel), self.kernel // 2
        precision = jax.lax.Precision.HIGHEST if self.exact and self.dtype == jnp.float32 else None
        conv = nn.Conv(self.features, size, self.stride, pad, use_bias=False, dtype=self.dtype,
                       precision=precision, kernel_init=_conv_init, name="conv",
                       conv_general_dilated=convolve if train else None)  # fmt: skip
        scale_init = nn.initializers.zeros if self.zero_scale else nn.initializers.ones
        norm = BatchNorm(scale_init=scale_init, reduce_moments=self.reduce_moments, name="norm")
        if train and not self.is_initializing() and self._expands(x.shape):
            pointwise: jax.Array = self.get_variable("params", "conv")["kernel"][0, 0]
            x = x[:, :: self.stride, :: self.stride].astype(self.dtype)
            return norm(x, train=True, mask=mask, kernel=pointwise, precision=precision, rectified=self.rectified)
        return norm(conv(x), train=train, mask=mask, rectified=self.rectified)

    def _expands(self, shape: tuple[int, ...]) -> bool:
        """Tells whether training is to take the moments of an input of this shape and write no convolution's result."""
        if self.kernel != 1 or self.dtype == jnp.float16:  # products of channels, small as gradients, vanish in float16
            return False
        height, width = (-(-side // self.stride) for side in shape[1:3])
        return saves_traffic((shape[0], height, width, shape[3]), self.features)


class StemSegment(nn.Module):
    """The first convolution: 7x7, stride 2, and max-pool (`imagenet`), or 3x3, stride 1 (`cifar`)."""

    features: int
    stem: Stem
    dtype: jnp.dtype = jnp.dtype("float32")
    reduce_moments: ReduceMoments | None = None
    blur: bool = False
    exact: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array, keys: jax.Array) -> jax.Array:
        """Maps images of any number of channels to `features` channels."""
        kernel, stride = (7, 2) if self.stem == "imagenet" else (3, 1)
        layer = ConvNorm(self.features, kernel, stride, self.dtype, self.reduce_moments, exact=self.exact,
                         rectified=True, name="layer")  # fmt: skip
        y = layer(x.astype(self.dtype), train=train, mask=mask)
        if self.stem == "cifar":
            return y
        if self.blur:
            return blur(max_pool(y, 1))[:, ::2, ::2]
        return max_pool(y, 2)


class Block(nn.Module):
    """A residual block: two 3x3 convolutions, or 1x1, 3x3 and 1x1 at four times the width (bottleneck).

    Attributes:
        width: channels inside.
        stride: of its first 3x3 convolution, and of the projection.
        bottleneck: the second form.
        projection: where shapes differ, a convolution and no zeros.
        dtype: to compute in.
        reduce_moments: see `BatchNorm`.
        drop_path: rate at which examples skip the convolutions in training.
        blur: what is strided is blurred before.
        exact: see `ConvNorm`.
    """

    width: int
    stride: int
    bottleneck: bool
    projection: bool
    dtype: jnp.dtype = jnp.dtype("float32")
    reduce_moments: ReduceMoments | None = None
    drop_path: float = 0.0
    blur: bool = False
    exact: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array, keys: jax.Array) -> jax.Array:
        """Adds the block's change to its input, projected (or padded with zeros) where the shapes differ."""
        layer = partial(ConvNorm, dtype=self.dtype, reduce_moments=self.reduce_moments, exact=self.exact)
        features = 4 * self.width if self.bottleneck else self.width
        sizes = [(self.width, 1, 1), (self.width, 3, self.stride), (features, 1, 1)]
        if not self.bottleneck:
            sizes = [(self.width, 3, self.stride), (features, 3, 1)]
        y = x
        for index, (width, kernel, stride) in enumerate(sizes, start=1):
            last = index == len(sizes)
            y = blur(y) if self.blur and stride > 1 else y
            convolved = layer(width, kernel, stride, zero_scale=last, rectified=not last, name=f"layer{index}")
            y = convolved(y, train=train, mask=mask)
        if x.shape != y.shape:
            shortcut = layer(features, 1, self.stride, name="shortcut") if self.projection else None
            x = blur(x) if self.blur and self.stride > 1 else x
            x = shortcut(x, train=train, mask=mask) if shortcut else _pad_shortcut(x, features, self.stride)
        if train and self.drop_path:
            y = keep_or_drop(keys, self.drop_path, y, dims=0)
        return rectify(x + y)


def _pad_shortcut(x: jax.Array, features: int, stride: int) -> jax.Array:
    """Option A of He et al.: every `stride`-th pixel, the missing channels zero. No parameters."""
    missing = features - x.shape[-1]
    return jnp.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (missing // 2, missing - missing // 2)))


class Head(nn.Module):
    """Global average pooling and the classifier; logits are float32."""

    num_classes: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array, keys: jax.Array) -> jax.Array:
        """Returns logits, shape (examples, classes)."""
        pooled = x.astype(jnp.float32).mean((1, 2))
        if train and self.dropout:
            pooled = keep_or_drop(keys, self.dropout, pooled, dims=1)
        return nn.Dense(self.num_classes, kernel_init=nn.initializers.normal(0.01), name="fc")(pooled)


@dataclass(frozen=True)
class Architecture:
    """The shape of a ResNet: blocks per stage, width of the first stage, and the variant's choices."""

    blocks: tuple[int, ...]
    width: int
    bottleneck: bool
    projection: bool
    stem: Stem


ARCHITECTURES = {
    **{f"resnet{n}": Architecture(blocks, 64, bottleneck, True, "imagenet") for n, blocks, bottleneck in (
        (18, (2, 2, 2, 2), False), (34, (3, 4, 6, 3), False), (50, (3, 4, 6, 3), True),
        (101, (3, 4, 23, 3), True), (152, (3, 8, 36, 3), True))},
    **{f"resnet{n}": Architecture(((n - 2) // 6,) * 3, 16, False, False, "cifar")
       for n in (8, 14, 20, 32, 44, 56, 110)},
}  # fmt: skip
"""ImageNet's ResNet-18 to 152 (v1.5) and the CIFAR family of He et al., by name."""


def make_resnet(
    arch: str,
    *,
    num_classes: int,
    width: int | None = None,
    stem: Stem | None = None,
    dtype: str = "float32",
    reduce_moments: ReduceMoments | None = None,
    blur_pool: bool = False,
    drop_path: float = 0.0,
    dropout: float = 0.0,
    exact: bool = True,
) -> dict[str, nn.Module]:
    """Returns the chain of a ResNet.

    Args:
        arch: a name in `ARCHITECTURES`.
        num_classes: number of logits.
        width: channels of the first stage; each later stage doubles them. Default: the paper's.
        stem: `imagenet` or `cifar`. Default: the family's.
        dtype: type to compute in; parameters and statistics stay float32.
        reduce_moments: see `BatchNorm`.
        blur_pool: blur before every stride but the first convolution's.
        drop_path: rate at which the last block is skipped by examples; in proportion to its depth for another.
        dropout: rate of the pooled features.
        exact: see `ConvNorm`.

    >>> list(make_resnet("resnet8", num_classes=10))
    ['stem', 'stage1_block1', 'stage2_block1', 'stage3_block1', 'head']
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch={arch} is unknown; known: {', '.join(ARCHITECTURES)}")
    shape = ARCHITECTURES[arch]
    width = width or shape.width
    compute = jnp.dtype(dtype)
    chain: dict[str, nn.Module] = {
        "stem": StemSegment(width, stem or shape.stem, compute, reduce_moments, blur_pool, exact)
    }
    for stage, num_blocks in enumerate(shape.blocks):
        for block in range(num_blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            chain[f"stage{stage + 1}_block{block + 1}"] = Block(
                width * 2**stage, stride, shape.bottleneck, shape.projection, compute, reduce_moments,
                drop_path * len(chain) / sum(shape.blocks), blur_pool, exact,
            )  # fmt: skip
    return chain | {"head": Head(num_classes, dropout)}
