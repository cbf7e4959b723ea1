"""A run's configuration turned into its parts: the one place from which `train` and `explain` take them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from trjax import collectives
from trjax.chain import Chain
from trjax.config import Config
from trjax.cost import Machine, Topology, make_machine
from trjax.data.augment import make_augment, normalise
from trjax.data.batches import Batch
from trjax.data.sources import DataSpec, describe
from trjax.grouping import INDIFFERENT_SECONDS, SegmentCost, choose_launches, predict_exposed, predict_segments
from trjax.mesh import SPLIT, placement, split_batch
from trjax.optim import make_optimizer
from trjax.options import INIT_OPTIONS
from trjax.plan import NUM_RESULTS, ConvOrder, Plan, make_plan
from trjax.resnet import make_resnet
from trjax.state import TrainState, init_state
from trjax.step import conv_order_of, make_evaluation, make_train_step, state_formats
from trjax.targets import target_of_device


@dataclass(frozen=True)
class Program:
    """The parts of a run; making one compiles and computes nothing.

    Attributes:
        mesh: the devices.
        chain: the model.
        plan: where its gradients live.
        state_shape: a `TrainState` of shapes.
        batch_shape: a `Batch` of shapes.
        totals_shape: of an evaluation's totals.
        formats: where each array of the state lies.
        init: `() -> TrainState`, jitted.
        train_step: see `step.make_train_step`.
        accumulate: see `step.make_evaluation`.
        reduce_totals: likewise.
    """

    mesh: Mesh
    chain: Chain
    plan: Plan
    state_shape: TrainState
    batch_shape: Batch
    totals_shape: jax.ShapeDtypeStruct
    formats: Any
    init: Any
    train_step: Any
    accumulate: Any
    reduce_totals: Any

    def place(self, batch: Batch) -> Batch:
        """Splits a batch over the devices."""
        return jax.device_put(batch, placement(self.mesh, SPLIT))


def make_chain(config: Config, spec: DataSpec) -> Chain:
    """Returns the configured ResNet."""
    model = config.model
    return make_resnet(
        model.arch,
        num_classes=spec.num_classes,
        width=model.width or None,
        stem=None if model.stem == "default" else model.stem,
        dtype=config.precision,
        reduce_moments=collectives.sum_moments if config.bn == "sync" else None,
    )


def shape_state(chain: Chain, optimizer: optax.GradientTransformation, spec: DataSpec, seed: int = 0) -> TrainState:
    """Returns the shapes of the state; computes nothing."""
    return jax.eval_shape(partial(init_state, chain, optimizer, spec.image_shape, seed))


def shape_batch(spec: DataSpec, global_batch: int) -> Batch:
    """Returns the shapes of a global batch."""

    def shape(dtype: type[np.generic], *dims: int) -> Any:
        return jax.ShapeDtypeStruct((global_batch, *dims), dtype)

    return Batch(shape(np.uint8, *spec.image_shape), shape(np.int32), shape(np.float32), shape(np.int32))


def machine_of(mesh: Mesh, link_gbytes: float = 0.0) -> Machine:
    """Returns what the cost model takes the devices of a mesh for; one process is one host."""
    hosts = len({device.process_index for device in mesh.devices.flat})
    target = target_of_device(mesh.devices.flat[0].device_kind)
    return make_machine(target, Topology(hosts, mesh.size // hosts), link_gbytes)


def _segment_costs(
    config: Config, chain: Chain, shapes: TrainState, spec: DataSpec, machine: Machine
) -> tuple[SegmentCost, ...]:
    local_batch = split_batch(config.global_batch, machine.topology.world_size)
    return predict_segments(chain, shapes.params, shapes.batch_stats, spec.image_shape, local_batch, machine)


def _exposed(costs: Sequence[SegmentCost], plan: Plan, machine: Machine) -> float:
    return predict_exposed(costs, [(group.launch_after, group.size_bytes) for group in plan.groups], machine)


def _choose_plan(plan_groups: Callable[..., Plan], costs: Sequence[SegmentCost], machine: Machine) -> Plan:
    """Returns the plan of `--reducer auto`: the default one unless other groups are predicted to save time."""
    two_groups, chosen = plan_groups(), plan_groups(launches=choose_launches(costs, machine))
    saved = _exposed(costs, two_groups, machine) - _exposed(costs, chosen, machine)
    return chosen if saved > INDIFFERENT_SECONDS else two_groups


def compare_groupings(config: Config, machine: Machine, conv_order: ConvOrder) -> dict[str, tuple[Plan, float]]:
    """Returns the plan of each reducer, and the exposed seconds that the cost model predicts for it."""
    spec = describe(config.data)
    chain = make_chain(config, spec)
    shapes = shape_state(chain, make_optimizer(config.optim), spec)
    plan_groups = partial(make_plan, shapes.params, shapes.batch_stats, tuple(chain), conv_order=conv_order)
    costs = _segment_costs(config, chain, shapes, spec, machine)
    plans = {"two_group": plan_groups(), "auto": _choose_plan(plan_groups, costs, machine)}
    return {reducer: (plan, _exposed(costs, plan, machine)) for reducer, plan in plans.items()}


def make_program(config: Config, mesh: Mesh, chain: Chain | None = None) -> Program:
    """Returns the parts of a run on a mesh.

    Args:
        config: the run.
        mesh: its devices.
        chain: a model of one's own in place of the configured ResNet.

    Raises:
        ValueError: the global batch is not divisible by the number of devices.
    """
    split_batch(config.global_batch, mesh.size)
    spec = describe(config.data)
    chain = make_chain(config, spec) if chain is None else chain
    optimizer = make_optimizer(config.optim)
    shapes = shape_state(chain, optimizer, spec, config.seed)
    platform = mesh.devices.flat[0].platform
    conv_order = conv_order_of(platform)
    plan_groups = partial(make_plan, shapes.params, shapes.batch_stats, tuple(chain), conv_order=conv_order)
    if config.reducer == "auto":
        machine = machine_of(mesh, config.link_gbytes)
        plan = _choose_plan(plan_groups, _segment_costs(config, chain, shapes, spec, machine), machine)
    else:
        plan = plan_groups()
    formats = state_formats(mesh, shapes, conv_order)
    init = partial(init_state, chain, optimizer, spec.image_shape, config.seed)
    augment = make_augment(config.data, spec, config.seed)
    accumulate, reduce_totals = make_evaluation(chain, partial(normalise, spec=spec), mesh, formats)
    return Program(
        mesh=mesh,
        chain=chain,
        plan=plan,
        state_shape=shapes,
        batch_shape=shape_batch(spec, config.global_batch),
        totals_shape=jax.ShapeDtypeStruct((mesh.size, NUM_RESULTS), np.float32),
        formats=formats,
        init=jax.jit(init, out_shardings=formats, compiler_options=INIT_OPTIONS.get(platform)),
        train_step=make_train_step(
            chain, plan, optimizer, augment, mesh, formats, global_batch=config.global_batch, seed=config.seed
        ),
        accumulate=accumulate,
        reduce_totals=reduce_totals,
    )


def lower_step(program: Program) -> Any:
    """Returns the train step lowered for the program's shapes, ready to compile; no device computes."""
    scalars = jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((), np.int32)
    return program.train_step.lower(program.state_shape, program.batch_shape, *scalars)


def compile_program(program: Program) -> Program:
    """Returns the program with its step and its evaluation compiled, once for the whole run.

    A compiled function refuses any other shape, type or placement: nothing can compile again unnoticed.
    """
    state, batch, totals = program.state_shape, program.batch_shape, program.totals_shape
    return replace(
        program,
        train_step=lower_step(program).compile(),
        accumulate=program.accumulate.lower(totals, state.params, state.batch_stats, batch).compile(),
        reduce_totals=program.reduce_totals.lower(totals).compile(),
    )
