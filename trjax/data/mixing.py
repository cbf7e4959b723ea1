"""Mixing of examples and their targets: mixup, CutMix.

Sources: Zhang et al., "mixup: Beyond Empirical Risk Minimization", 2018; Yun et al., "CutMix", 2019.
"""

import jax
import jax.numpy as jnp
import numpy as np

from trjax.config.data import DataConfig
from trjax.data.batches import Batch, Inputs

_QUANTILES = 1025


def swap_neighbours(leaf: jax.Array) -> jax.Array:
    """Returns examples 1, 0, 3, 2 and so on: pairs that lie on one device at every world size, where parts are even.

    >>> swap_neighbours(jnp.arange(6)).tolist()
    [1, 0, 3, 2, 5, 4]
    """
    return leaf.reshape(-1, 2, *leaf.shape[1:])[:, ::-1].reshape(leaf.shape)


def _draw_beta(key: jax.Array, alpha: float) -> jax.Array:
    """Draws from Beta(alpha, alpha) by a table of its quantiles: no rejections, and so no loop on the device."""
    import scipy.special  # a tenth of a second, which every start would take

    quantiles = scipy.special.betaincinv(alpha, alpha, np.linspace(0, 1, _QUANTILES))
    return jnp.interp(jax.random.uniform(key), jnp.linspace(0, 1, _QUANTILES), jnp.asarray(quantiles, jnp.float32))


def _draw_box(key: jax.Array, share: jax.Array, height: int, width: int) -> jax.Array:
    """Returns 0 inside of a box with `1 - share` of the area, anywhere, cut off at the edges, and 1 around it."""
    side, corner = jnp.sqrt(1 - share), jax.random.uniform(key, (2,))
    sizes = zip((height, width), corner, strict=True)
    y, x = (jnp.abs(jnp.arange(size) + 0.5 - size * at) < size * side / 2 for size, at in sizes)
    return 1.0 - (y[:, None] & x[None, :])


def _draw_share(key: jax.Array, data: DataConfig, height: int, width: int) -> jax.Array:
    """Returns how much of each pixel an example keeps of itself, shape (height, width)."""
    which, share, where = jax.random.split(key, 3)
    blend = box = jnp.ones((height, width))
    if data.mixup:
        blend = jnp.full((height, width), _draw_beta(share, data.mixup))
    if data.cutmix:
        box = _draw_box(where, _draw_beta(share, data.cutmix), height, width)
    return jnp.where(jax.random.bernoulli(which) if data.mixup and data.cutmix else bool(data.mixup), blend, box)


def mix(keys: jax.Array, images: jax.Array, targets: jax.Array, block: Batch, data: DataConfig) -> Inputs:
    """Mixes every example with its neighbour, its targets by the share of the pixels that it keeps.

    Of mixup and CutMix, if both are asked for, each example draws one. One beside padding stays as it is.

    Args:
        keys: one for each example.
        images: float32, shape (examples, height, width, channels); their number is even.
        targets: float32, shape (examples, classes).
        block: theirs.
        data: the options.
    """
    height, width = images.shape[1:3]
    shares = jax.vmap(lambda key: _draw_share(key, data, height, width))(keys)
    shares = jnp.where(swap_neighbours(block.mask)[:, None, None] > 0, shares, 1.0)
    pixels, share = shares[..., None], shares.mean((1, 2))[:, None]
    return Inputs(
        pixels * images + (1 - pixels) * swap_neighbours(images),
        share * targets + (1 - share) * swap_neighbours(targets),
    )
