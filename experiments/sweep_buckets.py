"""How large should a bucket of gradients be? The DDP paper's question, asked of compiled programs.

PyTorch's buckets, from one for each gradient to one for all, are compiled once for each size and replayed on several
machines; trjax's own two groups, and those that it chooses for the machine, are the lines of reference.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from machines import compile_for, h100s, quick_config, replay_on
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report import announce, main, progress, write_rows

from trjax.audit.report import Report
from trjax.config.presets import preset_config
from trjax.config.run import Config, Reducing
from trjax.mesh import start_platform
from trjax.step.plan import Plan
from trjax.step.planner import plan_run
from trjax.step.program import shape_run
from trjax.xla.compiled import Compiled

MACHINES = {"1x8 NVLink": ("1x8", 0.0), "4x8 50 GB/s": ("4x8", 50.0), "32x8 12.5 GB/s": ("32x8", 12.5)}
"""Topologies, and the GB/s that each GPU reaches to other hosts."""
SIZES_MB = (0.0, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 128.0)
QUICK_SIZES_MB = (0.0, 0.8, 25.0)
COLORS = {"ddp": "#1f77b4", "two_group": "#d62728", "auto": "#2ca02c"}


@dataclass(frozen=True)
class Options:
    """Compile ResNet-50's step with buckets of several sizes for H100s; replay it on several machines."""

    quick: bool = False
    """A wide ResNet-8 on CIFAR-10 without augmentation, with fewer sizes of buckets."""
    out: Path = Path("results")
    """Folder for the CSV and the figure."""


def tabulate(found: Report) -> dict[str, float]:
    """Returns the columns of one program on one machine."""
    total = found.summary
    return {
        "AllReduces": total.all_reduces,
        "blocking": total.blocking,
        "communication ms": round(total.comm_ms, 3),
        "exposed ms": round(total.exposed_ms, 3),
        "bound ms": round(total.exposed_bound_ms, 3),
        "compute ms": round(total.compute_ms, 3),
        "step ms": round(total.step_ms, 3),
    }


def sweep_programs(config: Config, sizes_mb: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yields a row for each machine and program; a plan is compiled once, for 4x8 or where `auto` chooses it.

    Args:
        config: the run, with one device's batch.
        sizes_mb: MiB of the buckets.
    """
    shapes = shape_run(config)
    compiled: dict[Plan, Compiled] = {}
    programs: list[tuple[Reducing, float]] = [("ddp", size_mb) for size_mb in sizes_mb]
    for reducer, size_mb in [*programs, ("two_group", 0.0), ("auto", 0.0)]:
        for where, (topology, link_gbytes) in MACHINES.items():
            machine = h100s(topology, link_gbytes)
            batch = config.global_batch * machine.topology.world_size
            world = replace(config, reducer=reducer, bucket_mb=size_mb, link_gbytes=link_gbytes, global_batch=batch)
            plan = plan_run(world, shapes, machine, "OHWI")
            if plan not in compiled:
                progress(f"{reducer}, {size_mb:g} MiB, {len(plan.groups)} groups: compiling ...")
                there = machine if reducer == "auto" else h100s("4x8")
                own = replace(world, global_batch=config.global_batch * there.topology.world_size)
                compiled[plan], _ = compile_for(there, own)
            bucket = {"reducer": reducer, "bucket MiB": size_mb if reducer == "ddp" else ""}
            yield {"machine": where} | bucket | tabulate(replay_on(machine, compiled[plan], world, plan))


def _draw_machine(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    buckets = [row for row in rows if row["reducer"] == "ddp"]
    places = range(len(buckets))
    exposed = [row["exposed ms"] for row in buckets]
    axes.plot(places, exposed, "o-", color=COLORS["ddp"], label="ddp")
    axes.plot(
        places, [row["bound ms"] for row in buckets], ":", color=COLORS["ddp"], label="ddp: forced by dependencies"
    )
    for row in rows:
        if row["reducer"] != "ddp":
            style = "--" if row["reducer"] == "auto" else "-"
            label = f"{row['reducer']} ({row['AllReduces']} AllReduces)"
            axes.axhline(row["exposed ms"], color=COLORS[row["reducer"]], linestyle=style, label=label)
    labels = [f"{row['bucket MiB']:g}\n({row['AllReduces']})" for row in buckets]
    axes.set_xticks(places, labels)
    most = max(row["exposed ms"] for row in rows)
    axes.set(xlabel="bucket (MiB), below it the AllReduces", ylim=(-0.03 * most, 1.1 * most))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def draw(path: Path, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Draws exposed time over the size of the buckets, a panel for each machine."""
    figure = Figure(figsize=(13, 4.8), layout="constrained")
    for axes, where in zip(figure.subplots(1, len(MACHINES)), MACHINES, strict=True):
        _draw_machine(axes, [row for row in rows if row["machine"] == where])
        axes.set_title(where)
        axes.set_ylabel("exposed communication (ms)")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def sweep(options: Options) -> None:
    """Runs the experiment, prints the table and writes the files."""
    start_platform("cpu", "all")
    announce("predicted for H100s from what is compiled for them", options.out)
    config = quick_config() if options.quick else replace(preset_config("imagenet-resnet50"), global_batch=256)
    rows = list(sweep_programs(config, QUICK_SIZES_MB if options.quick else SIZES_MB))
    rows.sort(key=lambda row: list(MACHINES).index(row["machine"]))
    write_rows(options.out / "sweep_buckets.csv", rows)
    draw(options.out / "sweep_buckets.png", f"{config.model.arch} on H100s, {config.global_batch} images each", rows)


if __name__ == "__main__":
    main(sweep, Options)
