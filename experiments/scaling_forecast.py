"""How well would ResNet-50 scale, from 1 to 4096 GPUs, by the way its gradients are summed and the links there are?

Each program is compiled once for few and once for many GPUs, which need not be here, and replayed on every machine with
its own links.
    pmean      `shard_map`, one `jax.grad` of the whole loss, a `pmean` for every gradient and statistic
    per_leaf   trjax: an AllReduce for every gradient, from within the backward, as far as the compiler leaves them
    two_group  trjax: two AllReduces, launched from within the backward
    auto       trjax: those that each machine's links need
Efficiency is the share of a step in which a GPU computes: alone, nothing is exposed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compare_programs import make_ordinary_step
from machines import compile_checked, compile_for, mesh_of, reference_config, replay_on
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from report import Common, Row, announce, main, print_rows, progress, write_rows

from trjax.config.run import Config
from trjax.cost.collectives import predict_efficiency
from trjax.cost.machines import Machine, Topology, make_machine
from trjax.cost.targets import find_target
from trjax.mesh import start_platform
from trjax.step.program import make_program, shape_run
from trjax.step.run_plan import Shapes, plan_run
from trjax.xla.compiled import Compiled

PROGRAMS = {"pmean": "#7f7f7f", "per_leaf": "#d62728", "two_group": "#1f77b4", "auto": "#2ca02c"}
"""Programs, with their colors."""
LINE_WIDTHS = 2.0, 3.5, 6.0, 1.5  # where they lie on each other, every one shows
LARGEST = 16_384
FEW = 8  # GPUs: for more the compiler schedules AllReduces in another way, however many to a host


@dataclass(frozen=True)
class Variant:
    """Hosts to build a machine of: the GPU, how many to a host, and the GB/s that each reaches to other hosts."""

    target: str
    gpus_per_host: int
    link_gbytes: float

    @property
    def name(self) -> str:
        """In words."""
        where = "NVLink inside" if self.gpus_per_host > 1 else "no NVLink"
        return f"{self.target.upper()}, {self.gpus_per_host} a host, {where}, {self.link_gbytes:g} GB/s each"


VARIANTS = (Variant("h100", 8, 50.0), Variant("h100", 8, 25.0), Variant("a100", 8, 25.0), Variant("h100", 1, 12.5))


@dataclass(frozen=True)
class Published:
    """An efficiency that others measured.

    Attributes:
        world_size: GPUs.
        efficiency: share of the throughput of as many single GPUs.
        marker: in the figure.
        source: who, on what.
    """

    world_size: int
    efficiency: float
    marker: str
    source: str


PUBLISHED = (
    Published(8, 7248 / (8 * 938), "^", "NVIDIA's ResNet-50 v1.5, 8 A100, TF32"),
    Published(8, 16_621 / (8 * 2470), "v", "NVIDIA's ResNet-50 v1.5, 8 A100, mixed precision"),
    Published(256, 0.9, "s", "Goyal et al. 2017, 256 P100, 50 Gb/s Ethernet a host (about)"),
    Published(
        256, predict_efficiency(1.0, 1.0), "D", "Li et al. 2020, PyTorch DDP with NCCL, 256 GPUs: twice the time"
    ),
)
"""Of other programs, most on other hardware than the panel's."""


@dataclass(frozen=True)
class Options(Common):
    """Compile ResNet-50's train step and replay it on machines of 1 to 4096 GPUs: how well does it scale?"""

    gpus: int = 4096
    """Largest number of GPUs; the sizes are the powers of two up to it."""
    quick: bool = False
    """Forecast a ResNet-8 on CIFAR-10 without augmentation, for one kind of machine and few sizes."""


def machine_at(variant: Variant, world_size: int) -> Machine:
    """Returns the machine of that many GPUs, with hosts filled first."""
    local = min(world_size, variant.gpus_per_host)
    topology = Topology(world_size // local, local)
    link_gbytes = variant.link_gbytes if topology.hosts > 1 else 0.0
    return make_machine(find_target(variant.target), topology, link_gbytes)


def choose(config: Config, shapes: Shapes, machine: Machine) -> tuple[str, str]:
    """Returns whose groups `auto` takes on a machine, its own or those of `two_group`, and what launches them."""
    default, chosen = (
        plan_run(replace(config, reducer=name), shapes, machine, "OHWI") for name in ("two_group", "auto")
    )
    return "two_group" if chosen == default else "auto", ", ".join(group.launch_after for group in chosen.groups)


def compile_step(config: Config, name: str, machine: Machine) -> Compiled:
    """Compiles one program for a machine, to be replayed on others.

    Raises:
        ValueError: it does not compile.
    """
    topology, target = machine.topology, machine.target.name
    progress(f"{name}, {topology.hosts}x{topology.gpus_per_host} {target}: compiling ...")
    if name != "pmean":
        return compile_for(machine, replace(config, reducer=name))  # type: ignore[arg-type]
    mesh = mesh_of(machine)
    program = make_program(config, mesh)
    step = make_ordinary_step(config, program.gradients.chain, mesh, "pmean")
    return compile_checked(replace(program, steps={(0, 1): step}), name)


def forecast(config: Config, variants: Sequence[Variant], sizes: Sequence[int]) -> Iterator[Row]:
    """Yields the row of every machine and program; each distinct program compiles once for few GPUs, once for many.

    Args:
        config: the run, with one GPU's batch.
        variants: of hosts.
        sizes: numbers of GPUs.
    """
    compiled, shapes = dict[tuple[str, ...], Compiled](), shape_run(config)
    for variant, world_size in ((variant, size) for variant in variants for size in sizes):
        machine = machine_at(variant, world_size)
        here = replace(config, global_batch=config.global_batch * world_size, link_gbytes=variant.link_gbytes)
        for program in PROGRAMS:
            name, launches = choose(here, shapes, machine) if program == "auto" else (program, "")
            compile_size = max(world_size, sizes[1])  # one GPU waits for nothing, whatever it was compiled for
            scope = "few" if compile_size <= FEW else "many"
            if scope == "few" and name != "auto":  # whose groups depend on the size
                compile_size = FEW
            key = (variant.target, scope, name, launches if name == "auto" else "")
            if key not in compiled:
                sized = replace(here, global_batch=config.global_batch * compile_size)
                compiled[key] = compile_step(sized, name, machine_at(variant, compile_size))
            total = replay_on(machine, compiled[key], here).summary
            yield {
                "machine": variant.name,
                "GPUs": world_size,
                "hosts": machine.topology.hosts,
                "program": program,
                "AllReduces": total.all_reduces,
                "communication ms": round(total.comm_ms, 2),
                "exposed ms": round(total.exposed_ms, 3),
                "compute ms": round(total.compute_ms, 2),
                "step ms": round(total.step_ms, 2),
                "images/s": round(total.images_per_second),
                "efficiency %": round(100 * predict_efficiency(total.compute_ms, total.exposed_ms), 2),
                "launched after": launches,
            }


def _draw_machine(axes: Axes, rows: Sequence[Row]) -> None:
    for width, (program, color) in zip(LINE_WIDTHS, PROGRAMS.items(), strict=True):
        line = [(row["GPUs"], row["efficiency %"]) for row in rows if row["program"] == program]
        style: Any = {"color": color, "linewidth": width, "markersize": width + 2, "zorder": 3 - width / 10}
        axes.plot(*zip(*line, strict=True), "o-", **style)
    style = {"color": "none", "markeredgecolor": "black", "markersize": 8, "zorder": 4}
    for point in PUBLISHED:
        axes.plot(point.world_size, 100 * point.efficiency, point.marker, **style)
    sizes = sorted({row["GPUs"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draws the efficiency over the number of GPUs, a panel for each machine, with the published points in each."""
    machines = list(dict.fromkeys(row["machine"] for row in rows))
    columns = min(2, len(machines))
    figure = Figure(figsize=(6.5 * columns, 3.2 * -(-len(machines) // columns) + 2.2), layout="constrained")
    panels = figure.subplots(-(-len(machines) // columns), columns, sharex=True, sharey=True, squeeze=False)
    for axes, machine in zip(panels.flat, machines, strict=False):
        _draw_machine(axes, [row for row in rows if row["machine"] == machine])
        axes.set_title(machine, fontsize="medium")
    for axes in panels[:, 0]:
        axes.set_ylabel("efficiency (%)")
    for axes in panels[-1]:
        axes.set_xlabel("GPUs")
    handles = [Line2D([], [], color=color, marker="o", label=f"predicted: {name}") for name, color in PROGRAMS.items()]
    handles += [
        Line2D([], [], marker=point.marker, color="none", markeredgecolor="black", label=f"measured: {point.source}")
        for point in PUBLISHED
    ]
    title_of_legend = "measured: by others, with other programs and mostly on other hardware"
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize="small", title=title_of_legend)
    figure.suptitle(title, fontsize="large" if columns > 1 else "small")
    figure.savefig(path, dpi=150)


def run(options: Options) -> None:
    """Runs the experiment, prints the table and writes the files."""
    if not 8 <= options.gpus <= LARGEST or options.gpus & (options.gpus - 1):
        raise ValueError(f"gpus={options.gpus}: must be a power of two from 8 to {LARGEST}")
    start_platform("cpu", "all")
    config = reference_config(options.quick)
    sizes = [2**power for power in range(options.gpus.bit_length())]
    variants: Sequence[Variant] = VARIANTS
    if options.quick:
        sizes, variants = [1, 64, 256], VARIANTS[-1:]
    announce("compiled for GPUs that are not here", options.out)
    rows = list(forecast(config, variants, sizes))
    write_rows(options.out / "scaling_forecast.csv", rows)
    print("\nmeasured by others, with other programs and most of it on other hardware:")
    print_rows(
        [
            {"GPUs": point.world_size, "efficiency %": round(100 * point.efficiency, 1), "source": point.source}
            for point in PUBLISHED
        ]
    )
    what = f"{config.model.arch}, {config.global_batch} images a GPU"
    title = f"{what}: throughput a GPU, against the same program on one GPU"
    draw(options.out / "scaling_forecast.png", title, rows)


if __name__ == "__main__":
    main(run, Options)
