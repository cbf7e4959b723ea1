"""`python -m trjax.explain plan`: where gradients live."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trjax.config.command_line import parse_options
from trjax.cost.machines import Topology, make_machine, parse_topology
from trjax.cost.targets import CPU, find_target
from trjax.mesh import parse_devices, start_platform
from trjax.step.layouts import conv_order_of
from trjax.step.plan import Plan
from trjax.step.program import shape_run
from trjax.step.run_plan import compare_groupings
from trjax.text import format_table


@dataclass(frozen=True)
class PlanOptions:
    """Where every gradient lives."""

    target: str = "h100"
    """GPU to plan for: a100, h100, h200 or b200; with `--platform cpu`, the CPU devices of `--devices` instead."""
    topology: str = "1x8"
    """HOSTSxGPUS."""


def format_plan(plan: Plan) -> str:
    """Returns the table of all regions, and the totals of each group."""
    rows = []
    for group in plan.groups:
        for region in group.regions:
            offset, size = (count * group.itemsize_bytes for count in (region.offset_elements, region.size_elements))
            order = "" if len(region.shape) != 4 else "".join("HWIO"[dim] for dim in region.physical_order)
            shape = "x".join(str(dim) for dim in region.shape)
            rows.append([group.name, region.kind.value, region.name, shape, order, offset, size])
    regions = format_table(["group", "kind", "region", "shape", "order", "offset bytes", "bytes"], rows)
    totals, parameters = [], 0
    for group in plan.groups:
        gradients = sum(region.size_elements for region in group.regions if region.kind.value.startswith("G_"))
        parameters += gradients
        totals.append(
            [group.name, len(group.regions), gradients, group.size_elements, group.size_bytes, group.launch_after]
        )
    header = ["group", "regions", "parameters", "elements", "bytes", "launched after the backward of"]
    size_bytes = sum(group.size_bytes for group in plan.groups)
    sums = f"{parameters:,} parameters, {size_bytes:,} bytes in {len(plan.groups)} groups"
    if (shards := plan.shards) > 1:
        sums += f", each in {shards} shards: offsets are those in a shard, which holds 1/{shards} of every tensor"
    return f"{regions}\n\n{format_table(header, totals)}\n\n{sums}"


def format_choice(groupings: Mapping[str, tuple[Plan, float | None]], chosen: str) -> str:
    """Returns what the cost model predicts for each way of grouping, and the one that the run takes."""
    lines = []
    for reducer, (plan, exposed) in groupings.items():
        launches = ", ".join(dict.fromkeys(group.launch_after for group in plan.groups))
        taken = "  (this run)" if reducer == chosen else ""
        waits = "not one AllReduce a group" if exposed is None else f"{exposed * 1e3:.2f} ms exposed as planned"
        lines.append(f"{reducer}: {waits}, launched after {launches}{taken}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Prints where every gradient lives, and returns the exit code."""
    prog, purpose = "python -m trjax.explain plan", "Print where every gradient lives."
    config, options = parse_options(arguments, prog, purpose, PlanOptions())
    start_platform("cpu", "all")  # shapes only: no GPU is asked
    target, topology = find_target(options.target), parse_topology(options.topology)
    if config.platform == "cpu":
        target, topology = CPU, Topology(1, max(1, len(parse_devices(config.devices))))
    machine = make_machine(target, topology, config.link_gbytes)
    # The layout is a GPU's unless the CPU is asked for: that is where it is of interest.
    order = conv_order_of("cpu" if config.platform == "cpu" else "cuda")
    groupings = compare_groupings(config, shape_run(config), machine, order)
    print(f"{format_plan(groupings[config.reducer][0])}\n\n{format_choice(groupings, config.reducer)}")
    return 0
