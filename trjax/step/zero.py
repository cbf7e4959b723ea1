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

from trjax.step import collectives
from trjax.step.grouping import list_equations
from trjax.step.optim import apply_optimizer
from trjax.step.packing import all_finite, flatten_shard, join_shards, spread_shards, unflatten
from trjax.step.plan import Plan, Region
from trjax.step.state import TrainState, unscale
from trjax.trees import name_leaves, restore_leaves, select_leaves

_JOINING = (
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "dot_general", "conv_general",
    "arg", "cum", "sort", "top_k", "fft", "random", "threefry", "gather", "scatter",
)  # fmt: skip
_PROBE_TOLERANCE = 1e-5


def _convert(
    optimizer: optax.GradientTransformation, plan: Plan, state: TrainState,
    change: Callable[[Region, jax.Array], jax.Array],
) -> TrainState:  # fmt: skip
    """Returns the state with the leaves of its optimizer state that mirror a parameter changed."""
    regions = {region.name: region for region in plan.regions}
    trained = select_leaves(state.params, plan.trained)
    names = restore_leaves({name: name for name in name_leaves(trained)}, trained)
    convert = lambda leaf, name: change(regions[name], leaf)  # noqa: E731
    return replace(state, opt_state=optax.tree_utils.tree_map_params(optimizer, convert, state.opt_state, names))


def shard_state(optimizer: optax.GradientTransformation, plan: Plan, state: TrainState) -> TrainState:
    """Returns the state with its optimizer state in shards, one behind the other, shape (shards * elements,) each."""
    spread = lambda region, leaf: spread_shards(region, leaf, plan.shards).reshape(-1)  # noqa: E731
    return _convert(optimizer, plan, state, spread)


def join_state(optimizer: optax.GradientTransformation, plan: Plan, state: TrainState) -> TrainState:
    """Returns the state with whole optimizer state: the inverse of `shard_state`, for checkpoints."""
    join = lambda region, leaf: join_shards(region, leaf.reshape(plan.shards, -1))  # noqa: E731
    return _convert(optimizer, plan, state, join)


def opt_state_specs(optimizer: optax.GradientTransformation, opt_state: Any, sharded: Any, whole: Any) -> Any:
    """Returns a tree with `sharded` for the leaves of an optimizer state that mirror parameters, else `whole`."""
    return optax.tree_utils.tree_map_params(
        optimizer, lambda _: sharded, opt_state, transform_non_params=lambda _: whole
    )


def update_shards(
    state: TrainState,
    reduced: dict[str, jax.Array],
    plan: Plan,
    optimizer: optax.GradientTransformation,
    learning_rate: jax.Array,
) -> tuple[tuple[Any, Any, Any], jax.Array, jax.Array]:
    """Updates this device's shard of everything, then gathers the new parameters and statistics, group by group.

    Args:
        state: parameters whole, of the optimizer state this device's shard.
        reduced: this device's shard of every region, `backward.reduce_gradients`.
        plan: how the shards lie.
        optimizer: for a learning rate of one.
        learning_rate: float32, shape ().

    Returns:
        The new parameters, BatchNorm statistics and optimizer state; the results of the batch; and whether all sums
        are finite. A device whose shard of them is not gives parameters that are not numbers, and all devices see
        those: they agree without another collective.
    """
    trained = select_leaves(state.params, plan.trained)
    leaves, index, shards = name_leaves(trained), collectives.device_index(), plan.shards

    def own(region: Region) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(spread_shards(region, leaves[region.name], shards), index, keepdims=False)

    params = restore_leaves({region.name: own(region) for region in plan.regions if region.name in leaves}, trained)
    gradients = unscale(restore_leaves(reduced, trained), state.loss_scale)
    params, opt_state = apply_optimizer(optimizer, gradients, state.opt_state, params, learning_rate)
    finite = all_finite(reduced.values())
    params = jax.tree.map(lambda leaf: jnp.where(finite, leaf, jnp.nan), params)
    pieces = reduced | name_leaves(params)
    whole: dict[str, jax.Array] = {}
    gathered: list[jax.Array] = []
    for group in plan.groups:
        with jax.named_scope(f"all_reduce_{group.name}"):  # the second half of it
            gathered.append(collectives.all_gather(flatten_shard(group, pieces), gathered[-1] if gathered else None))
        whole |= unflatten(group, gathered[-1])
    params = restore_leaves(name_leaves(state.params) | whole, state.params)
    batch_stats = restore_leaves(whole, state.batch_stats)
    return (params, batch_stats, opt_state), whole["results"], all_finite(gathered)


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
    "or the norms of trjax.optim"
)


def _check_mirrors(optimizer: optax.GradientTransformation, opt_state: Any, params_shape: Any) -> None:
    """Refuses state that is neither a scalar nor like the parameters: a factored moment, for instance."""
    try:
        mirrored = optax.tree_utils.tree_map_params(
            optimizer, lambda leaf, param: leaf.shape == param.shape, opt_state, params_shape,
            transform_non_params=lambda leaf: leaf.ndim == 0,
        )  # fmt: skip
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
