"""Random keys: one stream per purpose, so that no two draws of a run share a key."""

from typing import Literal

import jax

_STREAMS = ("init", "augment", "dropout")


def stream_key(seed: int, stream: Literal["init", "augment", "dropout"]) -> jax.Array:
    """Returns the root key of one purpose.

    Threefry by name: the bits of a device's own generator depend on an example's position in its batch.
    """
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), _STREAMS.index(stream))
