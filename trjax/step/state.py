"""Everything that a step changes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from trjax.keys import stream_key
from trjax.models.chain import Chain, init_chain

FIRST_SCALE, LARGEST_SCALE, GROWTH_STEPS = 2.0**16, 2.0**24, 2000
"""Of the loss scale: at the beginning, at most; good steps behind which it doubles."""


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
        ema: running mean of the parameters and the statistics, `{"params": ..., "batch_stats": ...}`; `{}` if none is
            kept.
        loss_scale: what the loss is multiplied by before the backward, `{"scale": ..., "good_steps": ...}`; `{}` if by
            nothing.
    """

    params: Any
    batch_stats: Any
    opt_state: Any
    step: jax.Array
    skipped: jax.Array
    ema: Any
    loss_scale: Any


def init_state(
    chain: Chain,
    optimizer: optax.GradientTransformation,
    image_shape: tuple[int, ...],
    seed: int,
    select: Callable[[Any], Any] = lambda params: params,
    keep_ema: bool = False,
    scale_loss: bool = False,
) -> TrainState:
    """Returns the initial state: a function of the seed alone.

    Args:
        chain: the model.
        optimizer: of the parameters that are trained.
        image_shape: of one example.
        seed: of the parameters.
        select: leaves out the parameters that are frozen.
        keep_ema: keep a running mean too.
        scale_loss: for gradients in float16.
    """
    params, batch_stats = init_chain(chain, stream_key(seed, "init"), image_shape)
    zero = jnp.zeros((), jnp.int32)
    ema = {"params": params, "batch_stats": batch_stats} if keep_ema else {}
    loss_scale = {"scale": jnp.full((), FIRST_SCALE), "good_steps": zero} if scale_loss else {}
    return TrainState(params, batch_stats, optimizer.init(select(params)), zero, zero, ema, loss_scale)


def models_of(state: TrainState) -> dict[Literal["test", "ema"], tuple[Any, Any]]:
    """Returns what is evaluated of a state, parameters and statistics: its own, and its running means if any."""
    own: dict[Literal["test", "ema"], tuple[Any, Any]] = {"test": (state.params, state.batch_stats)}
    return own | ({"ema": (state.ema["params"], state.ema["batch_stats"])} if state.ema else {})


def unscale(gradients: Any, loss_scale: Any) -> Any:
    """Returns gradients without the factor that they were computed with."""
    return jax.tree.map(lambda leaf: leaf / loss_scale["scale"], gradients) if loss_scale else gradients


def next_loss_scale(loss_scale: Any, finite: jax.Array) -> Any:
    """Halves the factor behind a step that was not finite, doubles it behind 2000 good ones, up to a limit.

    Source: Micikevicius et al., "Mixed Precision Training", 2018.
    """
    if not loss_scale:
        return loss_scale
    scale, good_steps = loss_scale["scale"], loss_scale["good_steps"] + 1
    grows = finite & (good_steps >= GROWTH_STEPS)
    after = jnp.where(grows, jnp.minimum(2 * scale, LARGEST_SCALE), scale)
    return {
        "scale": jnp.where(finite, after, jnp.maximum(scale / 2, 1.0)),
        "good_steps": jnp.where(grows | ~finite, 0, good_steps),
    }
