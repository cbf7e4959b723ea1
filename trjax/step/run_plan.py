"""A configuration's plan: which reducer groups the gradients how, and what the cost model predicts for it."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from trjax.config.run import Config, Reducing
from trjax.cost.machines import Machine
from trjax.mesh import split_batch
from trjax.models.chain import Chain
from trjax.step.buckets import at_launches, find_frozen, two_groups
from trjax.step.collectives import all_reduce
from trjax.step.grouping import INDIFFERENT_SECONDS, SegmentCost, choose_launches, predict_exposed, predict_segments
from trjax.step.plan import ConvOrder, Plan, PlanSpec, list_tensors, make_plan
from trjax.step.reducers import make_reducer


@dataclass(frozen=True)
class Shapes:
    """What a plan is made from.

    Attributes:
        chain: the model.
        params: shapes of all parameters.
        batch_stats: shapes of the BatchNorm statistics.
        image: of one example.
    """

    chain: Chain
    params: Any
    batch_stats: Any
    image: tuple[int, ...]


def frozen_names(config: Config, shapes: Shapes) -> frozenset[str]:
    """Returns the names of the frozen parameters; raises ValueError for a pattern that names none."""
    return find_frozen(list_tensors(shapes.params, tuple(shapes.chain)), config.freeze)


def _costs(config: Config, shapes: Shapes, machine: Machine) -> tuple[SegmentCost, ...]:
    """Returns what each segment's last backward takes and leaves to reduce; below the lowest trained, nothing."""
    micro_batch = split_batch(config.global_batch, machine.topology.world_size, config.accumulate)
    costs = predict_segments(shapes.chain, shapes.params, shapes.batch_stats, shapes.image, micro_batch, machine)
    frozen, elements = frozen_names(config, shapes), Counter[int]()
    for tensor in list_tensors(shapes.params, tuple(shapes.chain)):
        elements[tensor.segment] += 0 if tensor.name in frozen else math.prod(tensor.shape)
    item_bytes = jnp.dtype(config.comm_dtype).itemsize
    return tuple(
        replace(
            cost,
            gradient_bytes=elements[index] * item_bytes,
            backward_seconds=cost.backward_seconds if any(elements[below] for below in range(index + 1)) else 0.0,
        )
        for index, cost in enumerate(costs)
    )


def _exposed(costs: Sequence[SegmentCost], plan: Plan, machine: Machine) -> float:
    return predict_exposed(costs, [(group.launch_after, group.size_bytes) for group in plan.groups], machine)


def _plan_spec(config: Config, shapes: Shapes, world_size: int, conv_order: ConvOrder) -> PlanSpec:
    reducer = make_reducer(config)
    return PlanSpec(
        reducer.split,
        conv_order,
        frozen=frozen_names(config, shapes),
        comm_dtype=config.comm_dtype,
        shards=world_size if reducer.sharded else 1,
        bundled=not reducer.ordinary,
    )


def _lay_out(shapes: Shapes, spec: PlanSpec) -> Plan:
    return make_plan(shapes.params, shapes.batch_stats, tuple(shapes.chain), spec)


def _choose(shapes: Shapes, spec: PlanSpec, costs: Sequence[SegmentCost], machine: Machine) -> Plan:
    """Returns the plan of `--reducer auto`: the default one unless other groups are predicted to save time."""
    position = {segment: index for index, segment in enumerate(shapes.chain)}
    launches = [position[segment] for segment in choose_launches(costs, machine)]
    default, chosen = (
        _lay_out(shapes, replace(spec, split=split)) for split in (two_groups, partial(at_launches, launches))
    )
    saved = _exposed(costs, default, machine) - _exposed(costs, chosen, machine)
    return chosen if saved > INDIFFERENT_SECONDS else default


def plan_run(
    config: Config,
    shapes: Shapes,
    machine: Machine,
    conv_order: ConvOrder,
    costs: Sequence[SegmentCost] | None = None,
) -> Plan:
    """Returns the plan of a run, the same on every process.

    Args:
        config: the run.
        shapes: of its model.
        machine: what it runs on.
        conv_order: physical order of kernels.
        costs: of the segments, if they are known: `auto` then need not trace them.

    Raises:
        ValueError: the global batch is not divisible by the number of devices, or `freeze` cannot be.
    """
    spec = _plan_spec(config, shapes, machine.topology.world_size, conv_order)
    if config.reducer == "auto":
        return _choose(shapes, spec, costs or _costs(config, shapes, machine), machine)
    return _lay_out(shapes, spec)


def compare_groupings(
    config: Config, shapes: Shapes, machine: Machine, conv_order: ConvOrder
) -> dict[str, tuple[Plan, float | None]]:
    """Returns the plans of the run's reducer and of the usual ones, and the exposed seconds predicted for each.

    None for a reducer that is not one AllReduce a group: only its compiled program tells.
    """
    costs = _costs(config, shapes, machine)
    usual: tuple[Reducing, ...] = ("two_group", "auto", "ddp")
    plans: dict[str, tuple[Plan, float | None]] = {}
    for name in dict.fromkeys((*usual, config.reducer)):
        run = replace(config, reducer=name)
        plan = plan_run(run, shapes, machine, conv_order, costs)
        plans[name] = plan, _exposed(costs, plan, machine) if make_reducer(run).launch is all_reduce else None
    return plans
