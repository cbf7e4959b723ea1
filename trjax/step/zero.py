"""ZeRO, stage 1: every device keeps and updates the optimizer state of its shard of the parameters alone.

Each group's buffer is laid out shard by shard with a part of every parameter in each, so that a device's shard is a
tree of vectors on which an optax transformation runs as on any other. The parameters themselves stay whole on every
device.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trjax.data.batches import Batch
from trjax.step import collectives
from trjax.step.backward import choose_backward, start_step
from trjax.step.grouping import list_equations
from trjax.step.optim import apply_optimizer
from trjax.step.packing import (
    all_finite,
    check_finite,
    join_shards,
    pack_shard,
    split_shards,
    unpack,
    unpack_means,
)
from trjax.step.plan import Plan, Region
from trjax.step.spec import StepSpec, Update
from trjax.step.state import TrainState, select_state, unscale
from trjax.trees import name_leaves, restore_leaves, select_leaves

_JOINING = (
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "dot_general", "conv_general",
    "arg", "cum", "sort", "top_k", "fft", "random", "threefry", "gather", "scatter",
)  # fmt: skip
_PROBE_TOLERANCE = 1e-5


def _convert(
    optimizer: optax.GradientTransformation,
    plan: Plan,
    state: TrainState,
    change: Callable[[Region, jax.Array], jax.Array],
) -> TrainState:
    """Returns the state with the leaves of its optimizer state that mirror a parameter changed."""
    regions = {region.name: region for region in plan.regions}
    trained = select_leaves(state.params, plan.trained)
    names = restore_leaves({name: name for name in name_leaves(trained)}, trained)
    convert = lambda leaf, name: change(regions[name], leaf)  # noqa: E731
    return replace(state, opt_state=optax.tree_utils.tree_map_params(optimizer, convert, state.opt_state, names))


def shard_state(optimizer: optax.GradientTransformation, plan: Plan, state: TrainState) -> TrainState:
    """Returns the state with its optimizer state in shards, one behind the other, shape (shards * elements,) each."""
    split = lambda region, leaf: split_shards(region, leaf, plan.shards).reshape(-1)  # noqa: E731
    return _convert(optimizer, plan, state, split)


def join_state(optimizer: optax.GradientTransformation, plan: Plan, state: TrainState) -> TrainState:
    """Returns the state with whole optimizer state: the inverse of `shard_state`, for checkpoints."""
    join = lambda region, leaf: join_shards(region, leaf.reshape(plan.shards, -1))  # noqa: E731
    return _convert(optimizer, plan, state, join)


def opt_state_specs(optimizer: optax.GradientTransformation, opt_state: Any, sharded: Any, whole: Any) -> Any:
    """Returns a tree with `sharded` for the leaves of an optimizer state that mirror parameters, else `whole`."""
    return optax.tree_utils.tree_map_params(
        optimizer, lambda _: sharded, opt_state, transform_non_params=lambda _: whole
    )


def _own_shards(plan: Plan, params: Any) -> Any:
    """Returns this device's shard of every parameter, shape (shard_elements,) each."""
    leaves, index = name_leaves(params), collectives.device_index()
    rows = {
        region.name: split_shards(region, leaves[region.name], plan.shards)
        for region in plan.regions
        if region.name in leaves
    }
    own = {name: jax.lax.dynamic_index_in_dim(row, index, keepdims=False) for name, row in rows.items()}
    return restore_leaves(own, params)


def gather_shards(plan: Plan, pieces: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
    """Gathers the shards of all regions, group by group.

    Args:
        plan: how the shards lie.
        pieces: this device's shard of every region.

    Returns:
        Every region's tensor, whole, by name; and whether all of them are finite, the same on all devices.
    """
    whole: dict[str, jax.Array] = {}
    gathered: list[jax.Array] = []
    for group in plan.groups:
        with jax.named_scope(f"all_reduce_{group.name}"):  # the second half of it
            gathered.append(collectives.all_gather(pack_shard(group, pieces), gathered[-1] if gathered else None))
        whole |= unpack(group, gathered[-1])
    return whole, all_finite(gathered)


def make_sharded_update(spec: StepSpec) -> Update:
    """Returns the update of one device that owns a shard of everything; see `update.make_update` for a whole one.

    The sums arrive as shards, the optimizer updates this device's shard of each parameter, and the new parameters and
    statistics are gathered, group by group. A device whose shard of the sums is not finite gives parameters that are
    not numbers. All devices see those, and so they agree without another collective.
    """
    how = spec.gradients
    backward = choose_backward(how)

    def update(
        state: TrainState, block: Batch, learning_rates: jax.Array, votes: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        inputs = start_step(spec, state, votes)
        learning_rate = learning_rates[state.step - state.skipped]
        prepare = lambda micro: spec.augment(micro, state.step // spec.steps_per_epoch)  # noqa: E731
        sums: dict[str, jax.Array] = {}
        last = None
        for group, buffer in backward(how, inputs, block, prepare):
            with jax.named_scope(f"all_reduce_{group.name}"):
                sums[group.name] = last = how.launch(buffer, last)
        shards = unpack_means(how, check_finite(sums)[0])
        trained = select_leaves(state.params, how.plan.trained)
        gradients = unscale(restore_leaves(shards, trained), state.loss_scale)
        own = _own_shards(how.plan, trained)
        changed, opt_state = apply_optimizer(spec.optimizer, gradients, state.opt_state, own, learning_rate)
        finite = all_finite(shards.values())
        changed = jax.tree.map(lambda leaf: jnp.where(finite, leaf, jnp.nan), changed)
        whole, finite = gather_shards(how.plan, shards | name_leaves(changed))
        params = restore_leaves(name_leaves(state.params) | whole, state.params)
        batch_stats = restore_leaves(whole, state.batch_stats)
        new = select_state(state, finite, (params, batch_stats, opt_state), spec.ema_decay)
        return new, jnp.append(whole["results"], jnp.where(finite, 0.0, 1.0))

    return update


def _first_half(leaf: Any) -> np.ndarray:
    flat = np.ravel(np.asarray(leaf))
    return flat[: -(-flat.size // 2)]


def _last_update(optimizer: optax.GradientTransformation, params: Any, gradients: Sequence[Any]) -> Any:
    opt_state, updates = optimizer.init(params), params
    for gradient in gradients:
        updates, opt_state = optimizer.update(gradient, opt_state, params)
    return updates


_REFUSED = (
    "reducer=zero1: the optimizer {}: its update of a shard would not be the shard of its update; use another reducer, "
    "or the norms of trjax.step.optim"
)


def _check_mirrors(optimizer: optax.GradientTransformation, opt_state: Any, params_shape: Any) -> None:
    """Refuses state that is neither a scalar nor like the parameters: a factored moment, for instance."""
    try:
        mirrored = optax.tree_utils.tree_map_params(
            optimizer,
            lambda leaf, param: leaf.shape == param.shape,
            opt_state,
            params_shape,
            transform_non_params=lambda leaf: leaf.ndim == 0,
        )
    except ValueError as error:
        raise ValueError(_REFUSED.format("keeps state for some parameters only")) from error
    if not all(jax.tree.leaves(mirrored)):
        raise ValueError(_REFUSED.format("keeps state of other shapes than the parameters'"))


def _check_primitives(optimizer: optax.GradientTransformation, opt_state: Any, params_shape: Any) -> None:
    """Refuses what joins elements of a parameter, or draws random numbers: both differ from shard to shard."""
    jaxpr = jax.make_jaxpr(optimizer.update)(params_shape, opt_state, params_shape)
    for equation in list_equations(jaxpr.jaxpr):
        if equation.primitive.name.startswith(_JOINING):
            raise ValueError(_REFUSED.format(f"is not elementwise ({equation.primitive.name})"))


def check_elementwise(optimizer: optax.GradientTransformation, params_shape: Any) -> None:
    """Checks that an optimizer updates a part of each parameter as it updates the whole.

    Its state must be like the parameters, its update must join no elements, and must not depend on shapes: two
    steps on a tree like `params_shape`, but small, are computed for whole leaves and for their first halves.

    Raises:
        ValueError: one of these does not hold.
    """
    opt_state = jax.eval_shape(optimizer.init, params_shape)
    _check_mirrors(optimizer, opt_state, params_shape)
    _check_primitives(optimizer, opt_state, params_shape)
    random = np.random.default_rng(0)

    def draw(leaf: Any) -> np.ndarray:
        shape = [min(size, 2 + axis) for axis, size in enumerate(leaf.shape)]
        return np.asarray(random.normal(size=shape), np.float32)

    whole = [jax.tree.map(draw, params_shape) for _ in range(3)]
    halves = jax.tree.map(_first_half, whole)
    updates, of_halves = (_last_update(optimizer, tree[0], tree[1:]) for tree in (whole, halves))
    for expected, found in zip(*map(jax.tree.leaves, (updates, of_halves)), strict=True):
        if not np.allclose(found, _first_half(expected), _PROBE_TOLERANCE, _PROBE_TOLERANCE):
            raise ValueError(_REFUSED.format("depends on the shapes of parameters"))
