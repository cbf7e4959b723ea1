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
"""Of the loss scale: at the beginning, at most; good steps after which it doubles."""


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


@dataclass(frozen=True)
class StateSpec:
    """The initial state of a run.

    Attributes:
        chain: the model.
        image_shape: of one example.
        seed: of the parameters.
        keep_ema: keep a running mean too.
        scale_loss: for gradients in float16.
    """

    chain: Chain
    image_shape: tuple[int, ...]
    seed: int
    keep_ema: bool = False
    scale_loss: bool = False


def init_state(
    spec: StateSpec, optimizer: optax.GradientTransformation, select: Callable[[Any], Any] = lambda params: params
) -> TrainState:
    """Returns the initial state: a function of the seed alone.

    Args:
        spec: the state.
        optimizer: of the parameters that are trained.
        select: leaves out the parameters that are frozen.
    """
    params, batch_stats = init_chain(spec.chain, stream_key(spec.seed, "init"), spec.image_shape)
    zero = jnp.zeros((), jnp.int32)
    ema = {"params": params, "batch_stats": batch_stats} if spec.keep_ema else {}
    loss_scale = {"scale": jnp.full((), FIRST_SCALE), "good_steps": zero} if spec.scale_loss else {}
    return TrainState(params, batch_stats, optimizer.init(select(params)), zero, zero, ema, loss_scale)


def models_of(state: TrainState) -> dict[Literal["test", "ema"], tuple[Any, Any]]:
    """Returns what is evaluated of a state, parameters and statistics: its own, and its running means if any."""
    own: dict[Literal["test", "ema"], tuple[Any, Any]] = {"test": (state.params, state.batch_stats)}
    return own | ({"ema": (state.ema["params"], state.ema["batch_stats"])} if state.ema else {})


def unscale(gradients: Any, loss_scale: Any) -> Any:
    """Returns gradients without the factor that they were computed with."""
    return jax.tree.map(lambda leaf: leaf / loss_scale["scale"], gradients) if loss_scale else gradients


def next_loss_scale(loss_scale: Any, finite: jax.Array) -> Any:
    """Halves the factor after a step that was not finite, and doubles it after 2000 good ones, up to a limit.

    Source: Micikevicius et al., "Mixed Precision Training", 2018.
    """
    # flax's DynamicScale has no upper limit and takes only gradients of its own making; jmp has no release since 2023.
    if not loss_scale:
        return loss_scale
    scale, good_steps = loss_scale["scale"], loss_scale["good_steps"] + 1
    grows = finite & (good_steps >= GROWTH_STEPS)
    after = jnp.where(grows, jnp.minimum(2 * scale, LARGEST_SCALE), scale)
    return {
        "scale": jnp.where(finite, after, jnp.maximum(scale / 2, 1.0)),
        "good_steps": jnp.where(grows | ~finite, 0, good_steps),
    }


def _average(state: TrainState, params: Any, batch_stats: Any, decay: float) -> Any:
    """Returns the running mean with the new values in it; the first updates count for more, or it would lag behind.

    Source of the ramp: the moving averages of TensorFlow.
    """
    if not state.ema:
        return state.ema
    updates = (state.step - state.skipped).astype(jnp.float32)
    share = jnp.minimum(decay, (1 + updates) / (10 + updates))
    new = {"params": params, "batch_stats": batch_stats}
    return optax.incremental_update(state.ema, new, share)  # its first argument gets the share


def select_state(state: TrainState, finite: jax.Array, updated: tuple[Any, Any, Any], ema_decay: float) -> TrainState:
    """Returns the state after a batch: updated, or the old one except for the data position.

    Args:
        state: before the batch.
        finite: whether the sums are finite, bool, shape (); if not, nothing but the position changes.
        updated: new parameters, BatchNorm statistics and optimizer state.
        ema_decay: of the running mean, if the state has one.
    """
    params, batch_stats, _ = updated
    before = (state.params, state.batch_stats, state.opt_state, state.ema)
    after = (*updated, _average(state, params, batch_stats, ema_decay))
    kept: Any = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
    params, batch_stats, opt_state, ema = kept
    skipped, loss_scale = state.skipped + jnp.where(finite, 0, 1), next_loss_scale(state.loss_scale, finite)
    return TrainState(params, batch_stats, opt_state, state.step + 1, skipped, ema, loss_scale)
