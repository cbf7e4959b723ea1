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
        ema: running mean of the parameters and the statistics, `{"params": ..., "batch_stats": ...}`; `{}` if none is
            kept.
        skipped: int32, those of them that changed nothing else, because their gradients were not finite.
    """

    params: Any
    batch_stats: Any
    opt_state: Any
    step: jax.Array
    skipped: jax.Array
    ema: Any


def init_state(
    chain: Chain,
    optimizer: optax.GradientTransformation,
    image_shape: tuple[int, ...],
    seed: int,
    select: Callable[[Any], Any] = lambda params: params,
    keep_ema: bool = False,
) -> TrainState:
    """Returns the initial state: a function of the seed alone.

    Args:
        chain: the model.
        optimizer: of the parameters that are trained.
        image_shape: of one example.
        seed: of the parameters.
        select: leaves out the parameters that are frozen.
        keep_ema: keep a running mean too.
    """
    params, batch_stats = init_chain(chain, stream_key(seed, "init"), image_shape)
    zero = jnp.zeros((), jnp.int32)
    ema = {"params": params, "batch_stats": batch_stats} if keep_ema else {}
    return TrainState(params, batch_stats, optimizer.init(select(params)), zero, zero, ema)
