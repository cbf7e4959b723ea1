"""One compiled update, one compiled evaluation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh

from trjax import collectives
from trjax.backward import reduce_gradients, score
from trjax.batchnorm import fold_batchnorm
from trjax.chain import Chain, evaluate_chain
from trjax.data.augment import Preprocess
from trjax.data.batches import Batch
from trjax.keys import stream_key
from trjax.mesh import REPLICATED, SPLIT, placement
from trjax.options import probe_options
from trjax.plan import NUM_RESULTS, ConvOrder, Plan, physical_order, restore_leaves
from trjax.state import TrainState


def conv_order_of(platform: str) -> ConvOrder:
    """Returns the physical order of convolution kernels in which the platform's convolutions read them."""
    return "HWIO" if platform == "cpu" else "OHWI"


def state_formats(mesh: Mesh, state: TrainState, conv_order: ConvOrder) -> Any:
    """Returns where and in which physical order each array of a state lies: replicated, kernels pinned.

    With the parameters and the momentum in the order of the gradient regions, neither the gather nor the
    update transposes.

    Args:
        mesh: the devices.
        state: shapes are enough.
        conv_order: the plan's.
    """
    where = placement(mesh, REPLICATED)

    def pin(leaf: Any) -> Any:
        order = physical_order(leaf.shape, conv_order)
        return where if order == tuple(range(leaf.ndim)) else Format(Layout(order), where)

    return jax.tree.map(pin, state)


def _update(
    state: TrainState,
    reduced: dict[str, jax.Array],
    optimizer: optax.GradientTransformation,
    learning_rate: jax.Array,
) -> TrainState:
    gradients, batch_stats = restore_leaves(reduced, state.params), restore_leaves(reduced, state.batch_stats)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, jax.tree.map(lambda update: -learning_rate * update, updates))
    return TrainState(params, batch_stats, opt_state, state.step + 1)


def make_train_step(
    chain: Chain,
    plan: Plan,
    optimizer: optax.GradientTransformation,
    augment: Preprocess,
    mesh: Mesh,
    formats: Any,
    *,
    global_batch: int,
    seed: int,
) -> Any:
    """Returns the jitted update `(state, batch, learning_rate, epoch) -> (state, results)`.

    The state is donated. `results` is the batch's `R_RESULT`, float32, shape (4,). The learning rate and the
    epoch are scalars of the host and inputs of the program: no value of theirs compiles it again.

    Args:
        chain: the model.
        plan: its plan, in the physical order of `formats`.
        optimizer: for a learning rate of one.
        augment: maps a block and the epoch to the network's input.
        mesh: the devices; those of a topology description need not be there to compile.
        formats: of the state, from `state_formats`.
        global_batch: examples over all devices.
        seed: for dropout and the like.
    """

    def block_step(
        state: TrainState, block: Batch, learning_rate: jax.Array, epoch: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        key = jax.random.fold_in(stream_key(seed, "dropout"), state.step)
        reduced = reduce_gradients(
            chain,
            plan,
            state.params,
            state.batch_stats,
            augment(block, epoch),
            block.labels,
            block.mask,
            global_batch=global_batch,
            key=jax.random.fold_in(key, collectives.device_index()),
        )
        return _update(state, reduced, optimizer, learning_rate), reduced["results"]

    whole = placement(mesh, REPLICATED)
    return jax.jit(
        jax.shard_map(
            block_step, mesh=mesh, in_specs=(REPLICATED, SPLIT, REPLICATED, REPLICATED), out_specs=REPLICATED
        ),
        in_shardings=(formats, placement(mesh, SPLIT), whole, whole),
        out_shardings=(formats, whole),
        donate_argnums=0,
        compiler_options=probe_options(mesh).accepted,
    )


def make_evaluation(chain: Chain, preprocess: Callable[[jax.Array], jax.Array], mesh: Mesh, formats: Any) -> Any:
    """Returns the two programs of an evaluation: `accumulate` and `reduce_totals`.

    `accumulate(totals, params, batch_stats, batch) -> totals` adds a batch's `R_RESULT` to each device's own
    totals, float32, shape (devices, 4); it folds BatchNorm first, and communicates nothing.
    `reduce_totals(totals) -> results` sums them over the devices, shape (4,): the one AllReduce.
    Counts are exact below 2^24 examples a device.

    Args:
        chain: the model.
        preprocess: maps uint8 images to the network's input.
        mesh: the devices.
        formats: of the state, from `state_formats`.
    """

    def accumulate(totals: jax.Array, params: Any, batch_stats: Any, block: Batch) -> jax.Array:
        folded, rest = fold_batchnorm(params, batch_stats)
        logits = evaluate_chain(chain, folded, rest, preprocess(jnp.asarray(block.images)))
        return totals + score(logits, block.labels, block.mask)[1][None]

    def reduce_totals(totals: jax.Array) -> jax.Array:
        return collectives.sum_results(totals[0])

    compile_over = partial(jax.jit, compiler_options=probe_options(mesh).accepted)
    split, whole = placement(mesh, SPLIT), placement(mesh, REPLICATED)
    specs = (SPLIT, REPLICATED, REPLICATED, SPLIT)
    return (
        compile_over(
            jax.shard_map(accumulate, mesh=mesh, in_specs=specs, out_specs=SPLIT),
            in_shardings=(split, formats.params, formats.batch_stats, split),
            out_shardings=split,
            donate_argnums=0,
        ),
        compile_over(
            jax.shard_map(reduce_totals, mesh=mesh, in_specs=SPLIT, out_specs=REPLICATED),
            in_shardings=(split,),
            out_shardings=whole,
        ),
    )


def init_totals(mesh: Mesh) -> jax.Array:
    """Returns the zero totals of an evaluation, float32, shape (devices, 4), one row on each device."""
    return jax.device_put(np.zeros((mesh.size, NUM_RESULTS), np.float32), placement(mesh, SPLIT))
