"""`python -m trjax.explain plan` and `step`: where gradients live, and what a run compiles to, before it runs."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from trjax.audit import Audit, audit
from trjax.compilation import lower_step, needed_bytes
from trjax.compiled import Compiled, compile_lowered
from trjax.config import Config
from trjax.cost import Topology, make_machine, parse_topology
from trjax.forms import conv_order_of
from trjax.memory import device_bytes, require_device
from trjax.mesh import make_mesh, make_topology_mesh, parse_devices, split_batch, start_platform
from trjax.options import nccl_settings, probe_options
from trjax.plan import Plan
from trjax.planning import compare_groupings, expect, machine_of
from trjax.presets import parse_options
from trjax.program import make_program, shape_run
from trjax.records import format_table
from trjax.sizes import SMALLER
from trjax.tables import config_to_toml
from trjax.targets import CPU, compile_config, find_target

_HONEST = (
    "compiled without the device: autotuning and the pass that orders collectives on the device may change kernels, "
    "not the order that the dependencies force; times are predicted"
)


@dataclass(frozen=True)
class PlanOptions:
    """Where every gradient lives."""

    target: str = "h100"
    """GPU to plan for: a100, h100, h200 or b200; with `--platform cpu`, the CPU devices of `--devices` instead."""
    topology: str = "1x8"
    """HOSTSxGPUS."""


@dataclass(frozen=True)
class StepOptions:
    """What the train step compiles to."""

    target: str = ""
    """GPU to compile for: a100, h100, h200 or b200, h100 if left out; none is needed here."""
    topology: str = ""
    """HOSTSxGPUS, 1x8 if left out."""
    attached: bool = False
    """Compile for the devices of this machine (`--platform`, `--devices`) in place of a target."""
    strict: bool = False
    """Exit with 1 when a verdict is not ok."""
    hlo: str = ""
    """File for the scheduled HLO text."""
    json: str = ""
    """File for all figures as JSON."""
    figure: str = ""
    """Picture of the timeline; the ending names the format."""


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


def format_audit(found: Audit) -> str:
    """Returns the collectives, the summary and the verdicts as text."""
    rows = [
        [
            row.group, row.collective, row.reduces, row.bytes, row.dtype, "blocking" if row.blocking else "async",
            f"{row.ready_ms:.2f}", f"{row.start_ms:.2f}", f"{row.comm_ms:.3f}", f"{row.exposed_ms:.3f}",
            "{convolutions:.0f} convolutions, {kernels:.0f} other kernels, {ms:.2f} ms".format(**row.hidden_behind),
        ]
        for row in found.collectives
    ]  # fmt: skip
    header = ["group", "collective", "reduces", "bytes", "dtype", "kind"]
    header += ["ready ms", "start ms", "takes ms", "exposed ms", "hidden behind"]
    total = found.summary
    lines = [
        f"{total.all_reduces} collectives, {total.blocking} blocking",
        f"communication {total.comm_ms:.2f} ms, compute {total.compute_ms:.2f} ms",
        f"exposed {total.exposed_ms:.3f} ms: {total.exposed_bound_ms:.3f} forced by the dependencies, "
        f"{total.exposed_gap_ms:.3f} by the schedule",
        f"step {total.step_ms:.2f} ms, {total.images_per_second:,.0f} images/s on {total.world_size} devices",
        f"{total.hbm_bytes / 1e9:.1f} GB of memory traffic a step, {total.hbm_bytes_per_image / 1e9:.3f} GB an image",
        f"{total.temp_bytes / 1e9:.2f} GB of temporary memory",
        f"{total.kernels} kernels, {total.transposes} transpose, {total.gradient_transposes} of them gradients",
        f"{total.gather_copy_bytes:,} bytes copied only to gather gradients",
        f"CUDA graphs: {total.graphs}, with {total.graph_launches} launches inside and {total.launches} outside"
        if total.graphs + total.launches
        else "CUDA graphs: not known",
    ]
    verdicts = [f"{'ok    ' if verdict.ok else 'NOT OK'}  {verdict.text}" for verdict in found.verdicts]
    table = format_table(header, rows) if rows else "no collective: one device"
    return "\n".join([table, "", *lines, "", *verdicts])


def explain_plan(arguments: Sequence[str]) -> int:
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


def _prepare(config: Config, options: StepOptions) -> Mesh:
    """Returns the mesh to compile for: the devices here, or those of the target."""
    if options.attached:
        if options.target or options.topology:
            raise ValueError("attached: the devices of this machine are read; leave out --target and --topology")
        start_platform(config.platform, config.devices, nccl_settings(config))
        return make_mesh(config.devices, config.hosts)
    if config.hosts:
        raise ValueError("hosts: for a target, --topology says how many there are; leave out --hosts")
    target, topology = find_target(options.target or "h100"), parse_topology(options.topology or "1x8")
    split_batch(config.global_batch, topology.world_size)
    start_platform("cpu", "all")
    return make_topology_mesh(compile_config(target), topology.hosts, topology.gpus_per_host)


def _check_outputs(options: StepOptions) -> None:
    """Raises ValueError for a file that could not be written, before the long compilation."""
    for name in filter(None, (options.hlo, options.json, options.figure)):
        if not Path(name).parent.is_dir():
            raise ValueError(f"{name}: its folder does not exist")
        if Path(name).is_dir() or not os.access(Path(name).parent, os.W_OK):
            raise ValueError(f"{name}: cannot be written")
    if options.figure:
        from matplotlib.backend_bases import FigureCanvasBase  # half a second, which every start would take

        endings = FigureCanvasBase.get_supported_filetypes()
        if Path(options.figure).suffix.removeprefix(".") not in endings:
            raise ValueError(f"figure={options.figure}: its ending must be one of {', '.join(sorted(endings))}")


def _write(options: StepOptions, title: str, compiled: Compiled, found: Audit) -> None:
    if options.hlo:
        Path(options.hlo).write_text(compiled.text, encoding="utf-8")
    if options.json:
        table = {
            "collectives": [asdict(row) for row in found.collectives],
            "summary": asdict(found.summary),
            "verdicts": [asdict(verdict) for verdict in found.verdicts],
        }
        Path(options.json).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    if options.figure:
        from trjax.figures import draw_timeline  # and matplotlib

        draw_timeline(options.figure, title, found.timeline)


def explain_step(arguments: Sequence[str]) -> int:
    """Compiles the train step, prints what it holds, and returns the exit code."""
    prog, purpose = "python -m trjax.explain step", "Compile the train step and show what it holds."
    config, options = parse_options(arguments, prog, purpose, StepOptions())
    _check_outputs(options)
    found = examine(config, options)
    print(_format_examined(config, options, found))
    _write(options, found.title, found.compiled, found.audit)
    return 1 if options.strict and not found.audit.ok else 0


def dry_run(config: Config) -> int:
    """Prints a run's options, its plan, and what its step compiles to on the devices here; returns the exit code.

    Raises:
        ValueError: something cannot be: an option, the memory of the devices.
    """
    options = StepOptions(attached=True)
    print(config_to_toml(config))
    found = examine(config, options)
    print(f"{_format_examined(config, options, found)}\n\n{format_plan(found.plan)}")
    return 0


@dataclass(frozen=True)
class Examined:
    """What a run's step compiles to.

    Attributes:
        title: the run, and what its step was compiled for.
        mesh: these devices.
        plan: where its gradients live.
        compiled: the program.
        audit: what it holds.
        groupings: what other ways of grouping would cost.
    """

    title: str
    mesh: Mesh
    plan: Plan
    compiled: Compiled
    audit: Audit
    groupings: Mapping[str, tuple[Plan, float | None]]

    @property
    def needed_bytes(self) -> int:
        """Memory that the step needs on each device."""
        return needed_bytes(self.compiled.executable)


def examine(config: Config, options: StepOptions) -> Examined:
    """Compiles a run's step for what the options name, and reads the program.

    Raises:
        ValueError: it does not compile, or does not fit.
    """
    mesh = _prepare(config, options)
    machine = machine_of(mesh, config.link_gbytes)
    where = f"{machine.topology.hosts}x{machine.topology.gpus_per_host} {machine.target.name}"
    title = f"{config.preset}, {config.reducer}, bn={config.bn}, global batch {config.global_batch}, {where}"
    print(f"{title} ({mesh.devices.flat[0].device_kind}), jax {jax.__version__}: compiling ...", file=sys.stderr)
    program = make_program(config, mesh)
    try:
        compiled = compile_lowered(lower_step(program))
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"the step does not compile for {where}: {str(error).splitlines()[0]}") from error
    dropped = probe_options(mesh, config.deterministic).dropped
    found = audit(compiled, machine, config.global_batch, expect(config, program.plan, machine.topology), dropped)
    groupings = compare_groupings(config, shape_run(config), machine, "OHWI")
    examined = Examined(title, mesh, program.plan, compiled, found, groupings)
    present = machine.target.memory_bytes
    if options.attached:
        require_device(f"global_batch={config.global_batch}", mesh, examined.needed_bytes, SMALLER)
    elif examined.needed_bytes > present:
        raise ValueError(
            f"global_batch={config.global_batch} does not fit: the step needs {examined.needed_bytes / 1e9:.0f} GB on "
            f"each {machine.target.name}, which has {present / 1e9:.0f}; use a smaller one or more devices"
        )
    return examined


def _format_examined(config: Config, options: StepOptions, found: Examined) -> str:
    last = _HONEST
    if options.attached:
        needed, present = found.needed_bytes / 1e9, device_bytes(found.mesh) / 1e9
        last = f"memory: {needed:.3g} GB on each device, where there are {present:.3g}"
    choice = format_choice(found.groupings, config.reducer)
    return f"{found.title}\n\n{format_audit(found.audit)}\n\n{choice}\n{last}"
