"""Pinned layouts: in which order and where each array of a run's state lies, in the step and in checkpoints.

What is pinned, and why: on a GPU, convolution kernels, their momentum and the gradient regions lie in OHWI, as cuDNN
reads them. Otherwise the gather of gradients and the update would transpose each kernel: 53 transposes a step and
direction for ResNet-50. `state_formats` pins parameters and optimizer state; `plan.physical_order` is the order of the
regions; XLA's NCCL buffers (`options.USER_BUFFERS`) keep the flat buffers in one allocation. The verdicts `transposes`
and `one allocation` of `step.rules` hold it, in `tests/test_audit.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, PartitionSpec

from trjax.mesh import REPLICATED, SPLIT, placement
from trjax.step.options import INIT_OPTIONS
from trjax.step.plan import ConvOrder, Plan, physical_order
from trjax.step.state import TrainState
from trjax.step.zero import join_state, opt_state_specs, shard_state


@dataclass(frozen=True)
class StateLayouts:
    """The state as the step has it, and as checkpoints have it, whatever the reducer: every array whole.

    Attributes:
        shape: a `TrainState` of shapes, as the step has it.
        specs: how each part of it is spread over the devices.
        formats: where each array of it lies.
        saved_shape: of the form of checkpoints.
        init: `() -> TrainState`, jitted.
        load: from the form of checkpoints, arrays of the host, to that of the step.
        unload: the inverse.
    """

    shape: TrainState
    specs: TrainState
    formats: Any
    saved_shape: TrainState
    init: Callable[[], TrainState]
    load: Callable[[TrainState], TrainState]
    unload: Callable[[TrainState], TrainState]


def conv_order_of(platform: str) -> ConvOrder:
    """Returns the physical order of convolution kernels in which the platform's convolutions read them."""
    return "HWIO" if platform == "cpu" else "OHWI"


def state_specs(optimizer: optax.GradientTransformation, state: TrainState, sharded: bool) -> TrainState:
    """Returns how each part of a state is spread: whole on every device, the optimizer's in shards if `sharded`."""
    opt_state: Any = REPLICATED
    if sharded:
        opt_state = opt_state_specs(optimizer, state.opt_state, SPLIT, REPLICATED)
    return TrainState(REPLICATED, REPLICATED, opt_state, REPLICATED, REPLICATED, REPLICATED, REPLICATED)  # type: ignore[arg-type]


def state_formats(mesh: Mesh, state: TrainState, specs: TrainState, conv_order: ConvOrder) -> Any:
    """Returns where and in which physical order each array of a state lies: kernels pinned.

    With the parameters and the momentum in the order of the gradient regions, neither the gather nor the
    update transposes.

    Args:
        mesh: the devices.
        state: shapes are enough.
        specs: from `state_specs`.
        conv_order: the plan's.
    """

    def pin(spec: PartitionSpec, leaf: Any) -> Any:
        where, order = placement(mesh, spec), physical_order(leaf.shape, conv_order)
        return where if order == tuple(range(leaf.ndim)) else Format(Layout(order), where)

    def pin_all(spec: PartitionSpec, part: Any) -> Any:
        return jax.tree.map(partial(pin, spec), part)

    return jax.tree.map(pin_all, specs, state, is_leaf=lambda part: isinstance(part, PartitionSpec))


def _same(state: TrainState) -> TrainState:
    return state


def make_layouts(
    mesh: Mesh, plan: Plan, optimizer: optax.GradientTransformation, init: Callable[[], TrainState], sharded: bool
) -> StateLayouts:
    """Returns both layouts of a state; computes nothing.

    Args:
        mesh: the devices.
        plan: how shards lie, if there are any.
        optimizer: of whole parameters.
        init: makes the initial state, whole.
        sharded: the optimizer state is kept in shards.
    """
    platform = mesh.devices.flat[0].platform
    place = partial(state_formats, mesh, conv_order=conv_order_of(platform))
    load, unload = (partial(convert, optimizer, plan) if sharded else _same for convert in (shard_state, join_state))
    saved_shape = jax.eval_shape(init)
    shape = jax.eval_shape(load, saved_shape)
    specs = state_specs(optimizer, shape, sharded)
    formats = place(shape, specs)
    saved_formats = place(saved_shape, state_specs(optimizer, saved_shape, False))
    return StateLayouts(
        shape=shape,
        specs=specs,
        formats=formats,
        saved_shape=saved_shape,
        init=jax.jit(lambda: load(init()), out_shardings=formats, compiler_options=INIT_OPTIONS.get(platform)),
        load=jax.jit(load, in_shardings=placement(mesh, REPLICATED), out_shardings=formats),
        unload=jax.jit(unload, out_shardings=saved_formats) if sharded else unload,
    )
