"""Everything that a step changes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trjax.chain import Chain, init_chain
from trjax.keys import stream_key


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of a run, the same on all devices.

    Attributes:
        params: `{segment: tree}`, float32.
        batch_stats: `{segment: tree}`, float32.
        opt_state: of the optax transformation.
        step: int32, batches seen so far; with the global batch it is the data position.
        skipped: int32, those of them that changed nothing else, because their gradients were not finite.
    """

    params: Any
    batch_stats: Any
    opt_state: Any
    step: jax.Array
    skipped: jax.Array


def init_state(
    chain: Chain,
    optimizer: optax.GradientTransformation,
    image_shape: tuple[int, ...],
    seed: int,
    select: Callable[[Any], Any] = lambda params: params,
) -> TrainState:
    """Returns the initial state: a function of the seed alone.

    Args:
        chain: the model.
        optimizer: of the parameters that are trained.
        image_shape: of one example.
        seed: of the parameters.
        select: leaves out the parameters that are frozen.
    """
    params, batch_stats = init_chain(chain, stream_key(seed, "init"), image_shape)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(params, batch_stats, optimizer.init(select(params)), zero, zero)
