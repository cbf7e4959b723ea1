"""One compiled update, one compiled evaluation."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from trjax.data.augment import Preprocess
from trjax.data.batches import Batch
from trjax.keys import stream_key
from trjax.mesh import REPLICATED, SPLIT, SPLIT_MICRO, placement
from trjax.step.backward import Recipe, reduce_gradients
from trjax.step.optim import apply_optimizer
from trjax.step.plan import Plan
from trjax.step.state import TrainState, next_loss_scale, unscale
from trjax.step.zero import update_shards
from trjax.trees import name_leaves, restore_leaves, select_leaves
from trjax.xla.options import Options


def _update(
    state: TrainState,
    reduced: dict[str, jax.Array],
    plan: Plan,
    optimizer: optax.GradientTransformation,
    learning_rate: jax.Array,
) -> tuple[Any, Any, Any]:
    """Returns the new parameters, BatchNorm statistics and optimizer state."""
    trained = select_leaves(state.params, plan.trained)
    gradients = unscale(restore_leaves(reduced, trained), state.loss_scale)
    batch_stats = restore_leaves(reduced, state.batch_stats)
    params, opt_state = apply_optimizer(optimizer, gradients, state.opt_state, trained, learning_rate)
    return restore_leaves(name_leaves(state.params) | name_leaves(params), state.params), batch_stats, opt_state


def _average(state: TrainState, params: Any, batch_stats: Any, decay: float) -> Any:
    """Returns the running mean with the new values in it; the first updates count for more, or it would lag behind.

    Source of the ramp: the moving averages of TensorFlow.
    """
    if not state.ema:
        return state.ema
    updates = (state.step - state.skipped).astype(jnp.float32)
    share = jnp.minimum(decay, (1 + updates) / (10 + updates))
    new = {"params": params, "batch_stats": batch_stats}
    return jax.tree.map(lambda old, new: share * old + (1 - share) * new, state.ema, new)


def _advance(state: TrainState, finite: jax.Array, updated: tuple[Any, Any, Any], ema_decay: float) -> TrainState:
    """Returns the state behind a batch: updated, or as it was but for the data position if the sums are not finite."""
    params, batch_stats, _ = updated
    before = (state.params, state.batch_stats, state.opt_state, state.ema)
    after = (*updated, _average(state, params, batch_stats, ema_decay))
    kept: Any = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
    params, batch_stats, opt_state, ema = kept
    skipped, loss_scale = state.skipped + jnp.where(finite, 0, 1), next_loss_scale(state.loss_scale, finite)
    return TrainState(params, batch_stats, opt_state, state.step + 1, skipped, ema, loss_scale)


def make_train_step(
    recipe: Recipe,
    optimizer: optax.GradientTransformation,
    augment: Preprocess,
    mesh: Mesh,
    specs: TrainState,
    formats: Any,
    *,
    seed: int,
    steps_per_epoch: int,
    ema_decay: float = 0.0,
    written_out: bool = False,
    dispatch: int = 1,
    options: Options | None = None,
) -> Any:
    """Returns the jitted update `(state, batch, learning_rates, votes) -> (state, outcome)`.

    The state is donated. The learning rates are those of all updates of the run, float32, shape (updates,): the step
    takes that of its own, so that one that was skipped moves the schedule no more than the parameters. They are an
    input of the program: no value of theirs compiles it again. Votes are float32, shape (devices,): 1 asks to stop.
    `outcome` is the batch's `R_RESULT`, and 1 if it was skipped because the sums are not finite: float32, shape (6,).

    Args:
        recipe: how gradients come about; its plan in the physical order of `formats`.
        optimizer: for a learning rate of one.
        augment: maps a block and the epoch to the network's input and the targets.
        mesh: the devices; those of a topology description need not be there to compile.
        specs: how the state is spread, `StateForms.specs`.
        formats: where it lies, `StateForms.formats`.
        seed: for dropout and the like.
        steps_per_epoch: batches after which the epoch changes.
        ema_decay: of the running mean, if the state has one.
        dispatch: steps of one call; if more than 1, batches and outcomes have a leading dim of that many.
        written_out: the sums are the same on all devices, but `shard_map` cannot see it.
        options: to compile with; None leaves the compiler its own.
    """

    def block_step(
        state: TrainState, block: Batch, learning_rates: jax.Array, votes: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        key = jax.random.fold_in(stream_key(seed, "dropout"), state.step)
        epoch, learning_rate = state.step // steps_per_epoch, learning_rates[state.step - state.skipped]
        loss_scale = state.loss_scale["scale"] if state.loss_scale else 1.0
        reduced, finite = reduce_gradients(
            recipe, state.params, state.batch_stats, block, lambda micro: augment(micro, epoch), key, votes[0],
            loss_scale,
        )  # fmt: skip
        if recipe.sharded:
            updated, results, finite = update_shards(state, reduced, recipe.plan, optimizer, learning_rate)
        else:
            updated, results = _update(state, reduced, recipe.plan, optimizer, learning_rate), reduced["results"]
        return _advance(state, finite, updated, ema_decay), jnp.append(results, jnp.where(finite, 0.0, 1.0))

    def block_steps(
        state: TrainState, blocks: Batch, learning_rates: jax.Array, votes: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        # In a loop XLA's CPU convolutions are some ten times slower.
        unroll = mesh.devices.flat[0].platform == "cpu"
        step = partial(block_step, learning_rates=learning_rates, votes=votes)
        return jax.lax.scan(step, state, blocks, unroll=unroll)

    whole, batch_spec = placement(mesh, REPLICATED), train_split(recipe.micro_batches, dispatch)
    return jax.jit(
        jax.shard_map(
            block_step if dispatch == 1 else block_steps,
            mesh=mesh,
            in_specs=(specs, batch_spec, REPLICATED, SPLIT),
            out_specs=(specs, REPLICATED),
            check_vma=not written_out,
        ),
        in_shardings=(formats, placement(mesh, batch_spec), whole, placement(mesh, SPLIT)),
        out_shardings=(formats, whole),
        donate_argnums=0,
        compiler_options=options,
    )


def train_split(micro_batches: int, dispatch: int = 1) -> PartitionSpec:
    """Returns how training batches are split over the devices: each micro-batch by itself, if there are several."""
    spec = SPLIT if micro_batches == 1 else SPLIT_MICRO
    return spec if dispatch == 1 else PartitionSpec(None, *spec)
