"""What does each way to sum over the devices send, in how many steps, and what does it take?

Bytes and steps are counted in the compiled programs. Times are measured on the devices here, over message size and
world size, and predicted for machines with GPUs, with the sizes at which another algorithm becomes the fastest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from machines import h100s
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report import Common, Row, announce, hardware, main, progress, require_positive, save_panels, write_rows
from steps import time_calls
from study_collectives import count_traffic, make_sum, parameter_server, tree

from trjax.cost.collectives import CALL_SECONDS, predict_algorithms, predict_all_reduce
from trjax.cost.machines import Machine, Topology
from trjax.explain.cost import find_crossovers, format_bytes
from trjax.mesh import SPLIT, make_mesh, placement, start_platform
from trjax.step import collectives

ALGORITHMS = {
    "ring": (collectives.ring, "ring"),
    "tree": (tree, "double binary tree"),
    "hierarchical": (collectives.hierarchical, "hierarchical, rings"),
    "parameter_server": (parameter_server, "parameter server"),
    "psum": (collectives.all_reduce, ""),
}
"""By name: the sum, and what the cost model calls it; XLA chooses by itself how `psum` sums."""
COLORS = dict(zip(ALGORITHMS, ["#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "black"], strict=True))
SIZES = tuple(2**power for power in (10, 13, 16, 19, 22, 24))
MACHINES = ("1x8", "8x8", "128x8")
DRAWN_SIZES = np.logspace(3, 10, 141)


@dataclass(frozen=True)
class Options(Common):
    """Count, time and predict five ways to sum over the devices."""

    quick: bool = False
    """Use two message sizes, and at most four devices."""
    repeats: int = 15
    """Timed sums of each kind."""


def predict(algorithm: str, size_bytes: float, machine: Machine) -> float:
    """Returns the seconds of one sum with its call; of `psum` what trjax takes an AllReduce for."""
    if algorithm == "psum":
        return predict_all_reduce(size_bytes, machine)
    return CALL_SECONDS + predict_algorithms(size_bytes, machine)[ALGORITHMS[algorithm][1]].seconds


def crossovers(machine: Machine) -> list[tuple[float, str]]:
    """Returns from which size on which algorithm is predicted to be the fastest: all costs are straight lines."""
    at_rest, at_work = (predict_algorithms(size_bytes, machine) for size_bytes in (0.0, 1e9))
    lines = {
        name: (cost.seconds, (at_work[name].seconds - cost.seconds) / 1e9)
        for name, cost in at_rest.items()
        if cost.calls == 1
    }
    return find_crossovers(lines)


def measure(num_devices: int, size_bytes: int, repeats: int) -> list[Row]:
    """Returns a row for each algorithm: what its program sends, its median time here, the one predicted for GPUs."""
    topology = Topology(2, num_devices // 2) if num_devices > 2 else Topology(1, num_devices)
    mesh = make_mesh(f"0-{num_devices - 1}", topology.hosts)
    gpus = h100s(f"{topology.hosts}x{topology.gpus_per_host}")
    random = np.random.default_rng(0)
    buffers = random.normal(size=num_devices * size_bytes // 4).astype(np.float32)
    placed = jax.device_put(buffers, placement(mesh, SPLIT))
    sums = {name: make_sum(launch, mesh).lower(placed).compile() for name, (launch, _) in ALGORITHMS.items()}
    seconds = time_calls({name: partial(run, placed) for name, run in sums.items()}, repeats)
    rows: list[Row] = []
    for name, run in sums.items():
        traffic = count_traffic(run.as_text(), num_devices, topology.gpus_per_host)
        row = {"N": num_devices, "hosts": topology.hosts, "bytes": size_bytes, "algorithm": name}
        row |= {"sent": round(traffic.bytes_per_rank), "across hosts": round(traffic.across.max())}
        row |= {"steps": traffic.steps, "calls": traffic.calls, "measured ms": float(f"{seconds[name] * 1e3:.3g}")}
        rows.append(row | {"predicted H100 us": float(f"{predict(name, size_bytes, gpus) * 1e6:.4g}")})
    return rows


def _draw_measured(axes: Axes, rows: Sequence[Row]) -> None:
    for name, color in COLORS.items():
        own = [row for row in rows if row["algorithm"] == name]
        axes.loglog([row["bytes"] for row in own], [row["measured ms"] for row in own], "o-", color=color, ms=4)
    axes.set_title(f"here: N = {rows[0]['N']}, as hosts: {rows[0]['hosts']}", fontsize="medium")


def _draw_predicted(axes: Axes, where: str, machine: Machine) -> None:
    for name, color in COLORS.items():
        style: dict[str, Any] = {"linestyle": ":", "linewidth": 4, "alpha": 0.5} if name == "psum" else {}
        times = [predict(name, size, machine) * 1e3 for size in DRAWN_SIZES]
        axes.loglog(DRAWN_SIZES, times, color=color, **style)
    for index, (size, name) in enumerate(crossovers(machine)):
        if DRAWN_SIZES[0] < size < DRAWN_SIZES[-1]:
            axes.axvline(size, color="gray", linewidth=0.8)
            text, height = f" {name}\n from {format_bytes(size)}", 1.06 - 0.1 * index
            axes.text(size, height, text, va="top", fontsize=7, transform=axes.get_xaxis_transform())
    axes.set_xlim(DRAWN_SIZES[0], DRAWN_SIZES[-1])
    axes.set_title(f"predicted: {where} H100", fontsize="medium")


def draw(path: Path, where: str, rows: Sequence[Row]) -> None:
    """Draws time over message size: measured here, a panel for each N, over predicted, a panel for each machine."""
    sizes = list(dict.fromkeys(row["N"] for row in rows))
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    measured, predicted = figure.subplots(2, len(MACHINES), sharey="row")
    for axes in measured[len(sizes) :]:
        axes.set_axis_off()
    measured = measured[: len(sizes)]
    for axes, size in zip(measured, sizes, strict=True):
        _draw_measured(axes, [row for row in rows if row["N"] == size])
    for axes, topology in zip(predicted, MACHINES, strict=True):
        _draw_predicted(axes, topology, h100s(topology))
    for panels in (measured, predicted):
        panels[0].set_ylabel("time of one sum (ms)")
        for axes in panels:
            axes.set_xlabel("bytes on each device")
            axes.grid(alpha=0.3)
    legend = dict(zip(COLORS, measured[0].lines, strict=True))
    save_panels(path, figure, f"Sums over the devices; measured on {where}", legend)


def compare(options: Options) -> None:
    """Runs the experiment, prints the table and writes the files."""
    require_positive(repeats=options.repeats)
    start_platform("auto", "0-7")
    announce(hardware(), options.out)
    if jax.devices()[0].platform == "cpu":
        print("CPU devices share the cores, and an AllReduce between them is a rendezvous and a copy in memory: how")
        print("measured times grow says something, which algorithm is the fastest says nothing about a network")
    print("predicted: one sum on H100s, on as many hosts; a parameter server is there a machine of its own")
    counts = [count for count in (2, 4, 8) if count <= len(jax.devices())]
    sizes = SIZES
    if options.quick:
        options, counts, sizes = replace(options, repeats=min(options.repeats, 5)), counts[:2], (SIZES[0], SIZES[3])
    rows: list[Row] = []
    for count in counts:
        for size_bytes in sizes:
            progress(f"N = {count}, {format_bytes(size_bytes)} ...")
            rows += measure(count, size_bytes, options.repeats)
    if not rows:
        raise ValueError("one device has nothing to sum: use two or more")
    write_rows(options.out / "collective_algorithms.csv", rows)
    for topology in MACHINES:
        found = crossovers(h100s(topology))
        ranges = "; ".join(f"from {format_bytes(size)} {name}" for size, name in found)
        print(f"predicted fastest on {topology} H100: {ranges}")
    draw(options.out / "collective_algorithms.png", hardware(), rows)


if __name__ == "__main__":
    main(compare, Options)
