"""The update of a train step: one function reads as the recipe; what compiles it and runs it several times is below."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from trjax.data.batches import Batch
from trjax.mesh import REPLICATED, SPLIT, SPLIT_MICRO, placement
from trjax.step.backward import choose_backward, start_step
from trjax.step.layouts import StateLayouts
from trjax.step.optim import apply_optimizer
from trjax.step.packing import check_finite, unpack_means
from trjax.step.spec import StepSpec, Update
from trjax.step.state import TrainState, select_state, unscale
from trjax.step.zero import make_sharded_update
from trjax.trees import name_leaves, restore_leaves, select_leaves


def mean_statistics(leaves: dict[str, jax.Array], batch_stats: Any) -> Any:
    """Returns the new BatchNorm statistics: their mean over the devices, weighted by examples.

    This is the `pmean` of the statistics, without a collective of its own: `pack` has weighted each device's
    statistics by its share of the examples, they were summed at the end of the group `first`, and nothing is left but
    to take them out.
    """
    return restore_leaves(leaves, batch_stats)


def make_update(spec: StepSpec) -> Update:
    """Returns the update of one device, which runs inside of `shard_map`.

    It reads as the recipe: augment; backward in stages, each group of gradients summed over the devices as soon as it
    is complete, while the backward goes on to the next; one check; unpack; optimizer; keep the old state if a sum is
    not finite.
    """
    how, optimizer = spec.gradients, spec.optimizer
    backward = choose_backward(how)

    def update(
        state: TrainState, block: Batch, learning_rates: jax.Array, votes: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        inputs = start_step(spec, state, votes)
        learning_rate = learning_rates[state.step - state.skipped]
        prepare = lambda micro: spec.augment(micro, state.step // spec.steps_per_epoch)  # noqa: E731
        sums: dict[str, jax.Array] = {}
        last = None
        for group, buffer in backward(how, inputs, block, prepare):  # deep, then first, each as soon as it is complete
            with jax.named_scope(f"all_reduce_{group.name}"):  # by which a reader of the program knows it
                sums[group.name] = last = how.launch(buffer, last)  # psum: contiguous, in place, tied to the one before
        sums, finite = check_finite(sums)
        leaves = unpack_means(how, sums)  # mean over the real examples
        batch_stats = mean_statistics(leaves, state.batch_stats)  # they rode in `first`: no collective of their own
        trained = select_leaves(state.params, how.plan.trained)
        gradients = unscale(restore_leaves(leaves, trained), state.loss_scale)
        changed, opt_state = apply_optimizer(optimizer, gradients, state.opt_state, trained, learning_rate)
        params = restore_leaves(name_leaves(state.params) | name_leaves(changed), state.params)
        new = select_state(state, finite, (params, batch_stats, opt_state), spec.ema_decay)
        return new, jnp.append(leaves["results"], jnp.where(finite, 0.0, 1.0))

    return update


def repeat_update(update: Update, unroll: bool) -> Update:
    """Returns an update of several steps in one call: its batches and outcomes have a leading dim of that many.

    Args:
        update: of one step.
        unroll: write the steps out one after the other, not as a loop.
    """

    def updates(
        state: TrainState, blocks: Batch, learning_rates: jax.Array, votes: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        return jax.lax.scan(lambda now, block: update(now, block, learning_rates, votes), state, blocks, unroll=unroll)

    return updates


def make_train_step(spec: StepSpec, mesh: Mesh, layouts: StateLayouts, dispatch: int = 1) -> Any:
    """Returns the jitted update `(state, batch, learning_rates, votes) -> (state, outcome)`.

    The state is donated. The learning rates are those of all updates of the run, float32, shape (updates,): the step
    takes that of its own, so that one that was skipped moves the schedule no more than the parameters. They are an
    input of the program: no value of theirs compiles it again. Votes are float32, shape (devices,): 1 asks to stop.
    `outcome` is the batch's `R_RESULT`, and 1 if it was skipped because the sums are not finite: float32, shape (6,).

    Args:
        spec: the step; its plan in the physical order of `layouts`.
        mesh: the devices; those of a topology description need not be there to compile.
        layouts: how the state is spread over the devices, and in which order each array lies.
        dispatch: steps of one call; if more than 1, batches and outcomes have a leading dim of that many.
    """
    update = make_sharded_update(spec) if spec.gradients.sharded else make_update(spec)
    if dispatch > 1:  # in a loop XLA's CPU convolutions are some ten times slower
        update = repeat_update(update, unroll=mesh.devices.flat[0].platform == "cpu")
    whole, batch_spec = placement(mesh, REPLICATED), train_split(spec.gradients.micro_batches, dispatch)
    return jax.jit(
        jax.shard_map(
            update,
            mesh=mesh,
            in_specs=(layouts.specs, batch_spec, REPLICATED, SPLIT),
            out_specs=(layouts.specs, REPLICATED),
            check_vma=not spec.written_out,
        ),
        in_shardings=(layouts.formats, placement(mesh, batch_spec), whole, placement(mesh, SPLIT)),
        out_shardings=(layouts.formats, whole),
        donate_argnums=0,
        compiler_options=spec.options,
    )


def train_split(micro_batches: int, dispatch: int = 1) -> PartitionSpec:
    """Returns how training batches are split over the devices: each micro-batch by itself, if there are several."""
    spec = SPLIT if micro_batches == 1 else SPLIT_MICRO
    return spec if dispatch == 1 else PartitionSpec(None, *spec)
