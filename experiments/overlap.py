"""How much communication overlaps with the backward pass, for each way to group the gradients?

Compute only, communication only, both. The parts of a step are those of the DDP paper: forward, backward (compute),
exposed communication, optimizer. The step is measured on CPU devices, where an AllReduce blocks and nothing can
overlap, and replayed on machines with H100s from what compiles for them:
    single     one AllReduce after the whole backward pass: the step without overlap
    per_leaf   an AllReduce for each gradient
    ddp        PyTorch's buckets, from one for each gradient to one for all
    two_group  trjax: two AllReduces
    auto       trjax: the groups that it chooses for each machine
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from machines import compile_for, h100s, reference_config, replay_on, without_augmentation
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from report import Common, Row, announce, hardware, main, progress, require_positive, save_panels, write_rows
from step_parts import time_parts

from trjax.audit.figures import phase_of
from trjax.audit.report import Report
from trjax.config.presets import preset_config
from trjax.config.run import Config, Reducing
from trjax.mesh import make_mesh, start_platform
from trjax.models.chain import Chain
from trjax.models.resnet import Block, Head, StemSegment
from trjax.step.plan import Plan
from trjax.step.program import shape_run
from trjax.step.run_plan import plan_run
from trjax.xla.compiled import Compiled

REDUCERS: tuple[Reducing, ...] = ("single", "per_leaf", "two_group")
QUICK_REDUCERS: tuple[Reducing, ...] = ("single", "two_group")
SIZES_MB = (0.0, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 128.0)
QUICK_SIZES_MB = (0.0, 0.8, 25.0)
MACHINES = {
    "1x8 NVLink": ("1x8", 0.0),
    "4x8 50 GB/s": ("4x8", 50.0),
    "4x8 100 Gb/s a host": ("4x8", 12.5 / 8),
    "32x8 12.5 GB/s": ("32x8", 12.5),
}
"""Topologies, and the GB/s that each GPU reaches to other hosts; the third has the network of the DDP paper."""
PARTS = {"forward": "#9ecae1", "backward": "#3182bd", "exposed": "#d62728", "optimizer": "#bdbdbd"}
COMMUNICATION = "#fdae6b"
LINES = {"two_group": ("#d62728", "-"), "auto": ("#2ca02c", "--")}
DEVICES = 2  # as many as small machines have cores: with more, their compute is not at the same time


@dataclass(frozen=True)
class Options(Common):
    """Split a step into compute, communication and what overlaps: measured here, and predicted for H100s."""

    quick: bool = False
    """Measure one block without augmentation, and predict a ResNet-8, with fewer ways to group and machines."""
    repeats: int = 30
    """Timed steps of each kind."""


def small_chain() -> Chain:
    """Returns a chain with every kind of region that compiles fast."""
    return {
        "stem": StemSegment(32, "cifar"),
        "block": Block(256, 2, bottleneck=False, projection=True),
        "head": Head(10),
    }


def row_of(where: str, program: str, parts: dict[str, float], communication: float, found: Report | None) -> Row:
    """Returns a row from the milliseconds of a step's parts; a measured step has no report."""
    total = found.summary if found else None
    counts = {"AllReduces": total.all_reduces if total else "", "blocking": total.blocking if total else ""}
    times = {f"{name} ms": parts[name] for name in PARTS}
    times["compute only ms"] = sum(parts.values()) - parts["exposed"]
    times |= {"communication only ms": communication, "both ms": sum(parts.values())}
    row: Row = {"where": where, "program": program, "bucket MiB": ""} | counts
    row |= {name: round(milliseconds, 3) for name, milliseconds in times.items()}
    return row | {"bound ms": round(total.exposed_bound_ms, 3) if total else ""}


def measure(config: Config, chain: Chain | None, reducers: Sequence[Reducing], repeats: int) -> list[Row]:
    """Returns a row for each way to sum, measured on the devices here."""
    progress(f"{DEVICES} devices here: compiling and timing the parts of a step ...")
    taken = time_parts(config, chain, make_mesh(f"0-{DEVICES - 1}"), reducers, repeats)
    parts = {"forward": taken["forward"], "backward": taken["backward"] - taken["forward"]}
    parts["optimizer"] = taken["compute"] - taken["backward"]
    rows = []
    for name in reducers:
        exposed = {"exposed": taken[f"{name} step"] - taken["compute"]}
        rows.append(row_of("measured here", name, parts | exposed, taken[f"{name} sums"], None))
    return rows


def split_replay(found: Report) -> dict[str, float]:
    """Returns the milliseconds of the parts of a replayed step; the source of a kernel says which part it is."""
    phases: Counter[str] = Counter()
    for span in found.timeline.kernels:
        phases[phase_of(span)] += span.seconds * 1e3  # type: ignore[assignment]
    parts = {name: float(phases[name]) for name in ("forward", "backward")}
    rest = found.summary.compute_ms - sum(parts.values())
    return parts | {"exposed": found.summary.exposed_ms, "optimizer": rest}


def predict(
    config: Config, machines: Sequence[str], reducers: Sequence[Reducing], sizes_mb: Sequence[float]
) -> Iterator[Row]:
    """Yields a row for each machine and way to sum, replayed from what compiles: once for the same groups.

    Args:
        config: the run, with one device's batch.
        machines: names in `MACHINES`.
        reducers: besides `ddp` and `auto`.
        sizes_mb: MiB of the buckets of `ddp`.
    """
    ways: list[tuple[Reducing, float]] = [(name, 0.0) for name in reducers if name != "two_group"]
    ways += [("ddp", size_mb) for size_mb in sizes_mb]
    shapes, compiled = shape_run(config), dict[tuple[Plan, bool], Compiled]()
    for where in machines:
        topology, link_gbytes = MACHINES[where]
        machine = h100s(topology, link_gbytes)
        for reducer, size_mb in [*ways, ("two_group", 0.0), ("auto", 0.0)]:
            own = replace(config, reducer=reducer, bucket_mb=size_mb, link_gbytes=link_gbytes)
            world = replace(own, global_batch=config.global_batch * machine.topology.world_size)
            plan = plan_run(world, shapes, machine, "OHWI")
            key = plan, reducer == "per_leaf"  # which the compiler gets with its own options
            if key not in compiled:
                progress(f"{where}, {reducer}, {size_mb:g} MiB, {len(plan.groups)} groups: compiling for H100s ...")
                there = h100s("4x8") if reducer == "ddp" else machine
                there_batch = config.global_batch * there.topology.world_size
                compiled[key] = compile_for(there, replace(own, global_batch=there_batch))
            found = replay_on(machine, compiled[key], world, plan)
            row = row_of(where, reducer, split_replay(found), found.summary.comm_ms, found)
            yield row | {"bucket MiB": size_mb if reducer == "ddp" else ""}


def _draw_parts(axes: Axes, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        bottom = 0.0
        for part, color in PARTS.items():
            axes.bar(place - 0.12, max(0.0, row[f"{part} ms"]), 0.5, bottom, color=color)
            bottom += max(0.0, row[f"{part} ms"])
        axes.bar(place + 0.28, row["communication only ms"], 0.2, color=COMMUNICATION)
        axes.text(place - 0.12, bottom, f"{row['both ms']:.1f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(rows)), [row["program"] for row in rows], rotation=25)
    axes.set_title(rows[0]["where"], fontsize="medium")
    axes.set_ylabel("time of a step (ms)")
    axes.margins(y=0.12)


def _draw_buckets(axes: Axes, rows: Sequence[Row]) -> None:
    buckets = [row for row in rows if row["program"] == "ddp"]
    for column, style, label in (("exposed ms", "o-", "ddp"), ("bound ms", ":", "ddp: forced by dependencies")):
        axes.plot(range(len(buckets)), [row[column] for row in buckets], style, color="#1f77b4", label=label)
    for row in rows:
        if row["program"] in LINES:
            color, style = LINES[row["program"]]
            label = f"{row['program']} ({row['AllReduces']} AllReduces)"
            axes.axhline(row["exposed ms"], color=color, linestyle=style, label=label)
    axes.set_xticks(range(len(buckets)), [f"{row['bucket MiB']:g}\n({row['AllReduces']})" for row in buckets])
    most = max(row["exposed ms"] for row in buckets)
    axes.set(xlabel="bucket (MiB), below it the AllReduces", ylim=(-0.03 * most, 1.1 * most))
    axes.set_ylabel("exposed communication (ms)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def draw(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draws a panel for each place: the parts of its steps, with communication alone beside them, above its buckets."""
    places = list(dict.fromkeys(row["where"] for row in rows))
    figure = Figure(figsize=(5 * len(places), 9), layout="constrained")
    panels = figure.subplots(2, len(places))
    for column, where in enumerate(places):
        own = [row for row in rows if row["where"] == where]
        _draw_parts(panels[0, column], [row for row in own if row["program"] != "ddp"])
        if where in MACHINES:
            _draw_buckets(panels[1, column], own)
    panels[1, 0].set_axis_off()
    names = {"exposed": "communication that the step waits for", "optimizer": "optimizer and the rest"}
    legend = {names.get(part, part): Patch(color=color) for part, color in PARTS.items()}
    save_panels(path, figure, title, legend | {"communication only": Patch(color=COMMUNICATION)})


def compare(options: Options) -> None:
    """Runs the experiment, prints the table and writes the files."""
    require_positive(repeats=options.repeats)
    start_platform("cpu", f"0-{DEVICES - 1}")
    announce(f"measured on {hardware()}; predicted for H100s from what is compiled for them", options.out)
    here, there = replace(preset_config("digits"), global_batch=48 * DEVICES), reference_config(options.quick)
    if options.quick:
        rows = measure(without_augmentation(here), small_chain(), QUICK_REDUCERS, min(options.repeats, 5))
        rows += predict(there, list(MACHINES)[:3], QUICK_REDUCERS, QUICK_SIZES_MB)
    else:
        rows = measure(here, None, REDUCERS, options.repeats)
        rows += predict(there, list(MACHINES), REDUCERS, SIZES_MB)
    without = {row["where"]: row["both ms"] for row in rows if row["program"] == "single"}
    rows = [row | {"saved %": round(100 * (1 - row["both ms"] / without[row["where"]]), 1)} for row in rows]
    write_rows(options.out / "overlap.csv", rows)
    draw(options.out / "overlap.png", f"measured: {hardware()}; predicted: {there.model.arch} on H100s", rows)


if __name__ == "__main__":
    main(compare, Options)
