"""`python -m trjax.explain step`: what a run compiles to, before it runs."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from trjax.audit.report import Report
from trjax.config.command_line import parse_options
from trjax.config.run import Config
from trjax.config.toml import config_to_toml
from trjax.cost.machines import parse_topology
from trjax.cost.targets import find_target
from trjax.explain.plan import format_choice, format_plan
from trjax.memory import device_bytes, require_device
from trjax.mesh import machine_of, make_mesh, split_batch, start_platform
from trjax.step.compile import lower_step, needed_bytes
from trjax.step.expected import expect
from trjax.step.limits import SMALLER
from trjax.step.options import nccl_settings, probe_options
from trjax.step.plan import Plan
from trjax.step.program import make_program, shape_run
from trjax.step.rules import analyze_step
from trjax.step.run_plan import compare_groupings
from trjax.text import format_table
from trjax.xla.compiled import Compiled, compile_lowered
from trjax.xla.topology import compile_config, make_topology_mesh

_HONEST = (
    "compiled without the device: autotuning and the pass that orders collectives on the device may change kernels, "
    "not the order that the dependencies force; times are predicted"
)


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
    """File for a figure of the timeline; the ending names the format."""


@dataclass(frozen=True)
class CompiledRun:
    """A run's compiled step; as a string, a report of it.

    Attributes:
        title: the run, and the devices that its step was compiled for.
        plan: where its gradients live.
        compiled: the program.
        report: of the program.
        notes: the cost of other ways of grouping, and the memory needed.
    """

    title: str
    plan: Plan
    compiled: Compiled
    report: Report
    notes: str

    def __str__(self) -> str:
        return f"{self.title}\n\n{format_report(self.report)}\n\n{self.notes}"


def format_report(found: Report) -> str:
    """Returns the collectives, the summary and the verdicts as text."""
    rows = []
    for row in found.collectives:
        what = [row.group, row.collective, row.reduces, row.bytes, row.dtype, "blocking" if row.blocking else "async"]
        when = [f"{row.ready_ms:.2f}", f"{row.start_ms:.2f}", f"{row.comm_ms:.3f}", f"{row.exposed_ms:.3f}"]
        hidden = "{convolutions:.0f} convolutions, {kernels:.0f} other kernels, {ms:.2f} ms".format(
            **row.overlapped_with
        )
        rows.append([*what, *when, hidden])
    header = ["group", "collective", "reduces", "bytes", "dtype", "kind"]
    header += ["ready ms", "start ms", "takes ms", "exposed ms", "overlapped with"]
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


def _write(options: StepOptions, found: CompiledRun) -> None:
    if options.hlo:
        Path(options.hlo).write_text(found.compiled.text, encoding="utf-8")
    if options.json:
        table = {
            "collectives": [asdict(row) for row in found.report.collectives],
            "summary": asdict(found.report.summary),
            "verdicts": [asdict(verdict) for verdict in found.report.verdicts],
        }
        Path(options.json).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    if options.figure:
        from trjax.audit.figures import draw_timeline

        draw_timeline(options.figure, found.title, found.report)


def main(arguments: Sequence[str]) -> int:
    """Compiles the train step, prints what it holds, and returns the exit code."""
    prog, purpose = "python -m trjax.explain step", "Compile the train step and show what it holds."
    config, options = parse_options(arguments, prog, purpose, StepOptions())
    _check_outputs(options)
    found = examine(config, options)
    print(found)
    _write(options, found)
    return 1 if options.strict and not found.report.ok else 0


def dry_run(config: Config) -> int:
    """Prints a run's options, its plan, and what its step compiles to on the devices here; returns the exit code.

    Raises:
        ValueError: an option cannot be used, or the devices have too little memory.
    """
    print(config_to_toml(config))
    found = examine(config, StepOptions(attached=True))
    print(f"{found}\n\n{format_plan(found.plan)}")
    return 0


def examine(config: Config, options: StepOptions) -> CompiledRun:
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
    expected = expect(config, program.plan, machine.topology)
    found = analyze_step(compiled, machine, config.global_batch, expected, dropped)
    needed, present = needed_bytes(compiled.executable), machine.target.memory_bytes
    last = _HONEST
    if options.attached:
        require_device(f"global_batch={config.global_batch}", mesh, needed, SMALLER)
        last = f"memory: {needed / 1e9:.3g} GB on each device, where there are {device_bytes(mesh) / 1e9:.3g}"
    elif needed > present:
        raise ValueError(
            f"global_batch={config.global_batch} does not fit: the step needs {needed / 1e9:.0f} GB on "
            f"each {machine.target.name}, which has {present / 1e9:.0f}; use a smaller one or more devices"
        )
    choice = format_choice(compare_groupings(config, shape_run(config), machine, "OHWI"), config.reducer)
    return CompiledRun(title, program.plan, compiled, found, f"{choice}\n{last}")
