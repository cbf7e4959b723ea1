"""Random keys: one stream per purpose, so that no two draws of a run share a key."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

Stream = Literal["init", "augment", "dropout", "mix"]
_STREAMS = get_args(Stream)


def stream_key(seed: int, stream: Stream) -> jax.Array:
    """Returns the root key of one purpose.

    Threefry by name: the bits of a device's own generator depend on an example's position in its batch.
    """
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), _STREAMS.index(stream))


def example_keys(key: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns a key for each example, from its index: the same on any device, in any batch."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, indices)


def keep_or_drop(keys: jax.Array, rate: float, x: jax.Array, dims: int) -> jax.Array:
    """Returns `x` with a `rate` of it zero, the rest made larger so that its mean stays.

    Args:
        keys: one for each example.
        rate: in [0, 1).
        x: leading dim = examples.
        dims: how many dims of an example are drawn one by one; the others are zero or not as a whole.
    """
    shape = x.shape[1 : 1 + dims]
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, shape))(keys)
    kept = kept.reshape(kept.shape + (1,) * (x.ndim - kept.ndim))
    return jnp.where(kept, x / (1 - rate), 0)
