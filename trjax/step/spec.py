"""The parts of a step: small dataclasses, built once from the configuration, for the functions of the step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import optax

from trjax.data.augment import Preprocess
from trjax.data.batches import Batch
from trjax.models.chain import Chain
from trjax.step.collectives import Launch
from trjax.step.plan import Plan
from trjax.step.state import TrainState
from trjax.xla.options import CompileOptions


@dataclass(frozen=True)
class GradientPlan:
    """How the gradients of a step are computed and summed.

    Attributes:
        chain: the model.
        plan: where each gradient lies. Parameters that it does not hold are frozen, and have no gradient.
        global_batch: examples over all devices and micro-batches when nothing is padding.
        launch: sums a group over the devices.
        statistics: of BatchNorm: the mean over the devices, weighted by their examples, or those of the first device.
        micro_batches: number of parts of a block, along a dim of its own if there are more than one.
        sharded: `launch` gives this device's shard of the sum.
        remat: the part of the forward that the backward computes again instead of keeping it: the inside of every
            segment (`block`) or of every stage. A stage is a run of segments with the same name up to the last
            underscore.
    """

    chain: Chain
    plan: Plan
    global_batch: int
    launch: Launch
    statistics: Literal["mean", "first"] = "mean"
    micro_batches: int = 1
    sharded: bool = False
    remat: Literal["none", "stage", "block"] = "none"


@dataclass(frozen=True)
class StepSpec:
    """A train step, whatever the devices.

    Attributes:
        gradients: how gradients are computed and summed.
        optimizer: for a learning rate of one. With shards it sees this device's part of each parameter.
        augment: maps a block and the epoch to the network's input and the targets.
        seed: for dropout and stochastic depth.
        steps_per_epoch: batches after which the epoch changes.
        ema_decay: of the running mean, if the state has one.
        written_out: the sums are the same on all devices, but `shard_map` cannot see it.
        options: compile options; None leaves the compiler its own.
    """

    gradients: GradientPlan
    optimizer: optax.GradientTransformation
    augment: Preprocess
    seed: int
    steps_per_epoch: int
    ema_decay: float = 0.0
    written_out: bool = False
    options: CompileOptions | None = None


class StepInputs(NamedTuple):
    """The traced values of one step on one device, beside its examples.

    Attributes:
        params: `{segment: tree}`, float32, marked as differing between devices (`collectives.vary`).
        batch_stats: `{segment: tree}`, float32, marked likewise.
        key: for dropout and stochastic depth, the same on all devices; each example's index is folded into it.
        loss_scale: factor of all gradients, so that small ones do not vanish in float16; float32, shape ().
        vote: 1 if this device asks to stop, float32, shape ().
    """

    params: Any
    batch_stats: Any
    key: jax.Array
    loss_scale: jax.Array | float = 1.0
    vote: jax.Array | float = 0.0


Update = Callable[[TrainState, Batch, jax.Array, jax.Array], tuple[TrainState, jax.Array]]
"""`(state, block, learning_rates, votes) -> (state, outcome)` of one device, inside of `shard_map`."""
TrainStep = Callable[[TrainState, Batch, Any, Any], tuple[TrainState, jax.Array]]
"""The same on the mesh, jitted or compiled; see `update.make_train_step`."""
Accumulate = Callable[[jax.Array, Any, Any, Batch], jax.Array]
"""`(totals, params, batch_stats, batch) -> totals`, jitted or compiled; see `evaluation.make_evaluation`."""
ReduceTotals = Callable[[jax.Array], jax.Array]
"""`totals -> scores`, jitted or compiled; see `evaluation.make_evaluation`."""
