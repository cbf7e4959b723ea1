"""Does training give the same numbers at every world size, and what does a step cost there?

Training amplifies rounding; a control shows how far: the first size again, from parameters one rounding step away.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from report import Common, Row, announce, main, save_panels, write_rows
from steps import WARMUP_STEPS, train_run

from trjax.config.presets import preset_config
from trjax.config.run import Config
from trjax.data.batches import count_batches
from trjax.data.sources import load
from trjax.mesh import machine_of, make_mesh, parse_devices, start_platform
from trjax.step.compile import lower_step
from trjax.step.program import Program, make_program
from trjax.step.rules import analyze_step
from trjax.xla.compiled import compile_lowered

ROUND_STEPS = 10  # of one world size before the next has its turn, so that the machine's noise hits all alike
Step = tuple[float, float]  # seconds, mean loss


@dataclass(frozen=True)
class Options(Common):
    """Train the digits preset at several world sizes; compare the losses and time the steps."""

    world_sizes: str = "all"
    """World sizes, as in 1,2,3, each compared with the first; `all`: those of 1, 2, 4, 8 that fit the devices."""
    steps: int = 150
    """Steps at each world size."""
    quick: bool = False
    """Train 20 steps, at the first and the last world size only."""
    global_batch: int = 96
    """Examples of a step, over all devices."""
    bn: Literal["sync", "local"] = "sync"
    """BatchNorm mode; `local` computes another function at every world size, so that the losses must differ."""


def compile_step(config: Config, program: Program) -> tuple[Program, float]:
    """Returns the program with its step compiled, and the seconds that the cost model predicts for the step."""
    compiled = compile_lowered(lower_step(program))
    predicted = analyze_step(compiled, machine_of(program.mesh), config.global_batch).timeline.step_seconds
    return replace(program, steps={(0, 1): compiled.executable}), predicted


def measure(config: Config, sizes: Sequence[int], num_steps: int) -> tuple[np.ndarray, list[float]]:
    """Returns seconds and losses of all steps, shape (2, sizes + 1, steps), control last, and predicted seconds.

    Raises:
        ValueError: there are too few or too many steps.
    """
    source, _ = load(config.data)
    longest = config.epochs * count_batches(len(source), config.global_batch)
    if not WARMUP_STEPS < num_steps <= longest:
        raise ValueError(f"steps={num_steps}: must be {WARMUP_STEPS + 1} to {longest}, the length of the preset's run")
    made = [make_program(config, make_mesh(f"0-{size - 1}")) for size in sizes]
    # Compiling takes longest by far: only after all checks.
    programs, predicted = zip(*(compile_step(config, program) for program in made), strict=True)
    initial = jax.device_get(programs[0].init())  # for all: it compiles too, and does not depend on N
    nudged = replace(initial, params=jax.tree.map(lambda leaf: np.nextafter(leaf, np.inf), initial.params))
    arms = [(program, initial) for program in programs]
    arms.append((programs[0], nudged))
    runs = [train_run(config, program, state, config.seed) for program, state in arms]
    measured: list[list[Step]] = [[] for _ in runs]
    for start_step in range(0, num_steps, ROUND_STEPS):
        for steps, so_far in zip(runs, measured, strict=True):
            so_far += (step[1:] for step in islice(steps, min(ROUND_STEPS, num_steps - start_step)))
    return np.moveaxis(np.array(measured), 2, 0), list(predicted)


def tabulate(
    sizes: Sequence[int], seconds: np.ndarray, predicted: Sequence[float], difference: np.ndarray, global_batch: int
) -> list[Row]:
    """Returns a row for each world size; the spread is that of the middle half of the steps."""
    low, median, high = np.quantile(seconds[:, WARMUP_STEPS:], [0.25, 0.5, 0.75], axis=1)
    rows: list[Row] = []
    for size, step_time, spread, model, curve in zip(sizes, median, high - low, predicted, difference, strict=False):
        gain, predicted_gain = median[0] / step_time, predicted[0] / model
        costs = {"step ms": step_time * 1e3, "spread ms": spread * 1e3, "relative throughput": gain}
        costs |= {"efficiency": gain * sizes[0] / size, "predicted ms": model * 1e3}
        costs |= {"predicted efficiency": predicted_gain * sizes[0] / size}
        first, most, control = (float(f"{number:.2g}") for number in (curve[0], curve.max(), difference[-1].max()))
        row = {"N": size, "images/s": round(global_batch / step_time)}
        row |= {name: float(f"{number:.4g}") for name, number in costs.items()}
        row |= {"step 1 diff": first, "max diff": most, "at step": int(curve.argmax()) + 1}
        rows.append(row | {"control max diff": control})
    return rows


def draw(path: Path, title: str, rows: Sequence[Row], losses: np.ndarray, difference: np.ndarray) -> None:
    """Draws the loss curves over their relative differences, and the costs of a step."""
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.subplot_mosaic("LS;DR", width_ratios=[3, 2])
    colors, steps = colormaps["viridis"](np.linspace(0, 0.9, len(rows))), np.arange(1, losses.shape[1] + 1)
    positive = np.where(difference > 0, difference, np.nan)
    axes["D"].semilogy(steps, positive[-1], ".:", color="gray", label=f"N = {rows[0]['N']}, nudged (control)")
    for index, (row, color) in enumerate(zip(rows, colors, strict=True)):
        width = 2 * (len(rows) - index) - 1  # the later the thinner, so that every curve shows
        axes["L"].semilogy(steps, losses[index], color=color, linewidth=width, label=f"N = {row['N']}")
        axes["D"].semilogy(steps, positive[index], ".-", color=color, markersize=3, linewidth=1)
    axes["L"].set(ylabel="mean loss of the batch (nats)")
    axes["D"].set(xlabel="step", ylabel=f"relative difference\nto N = {rows[0]['N']} (zeros left out)")
    for key, column, label in (("S", "step ms", "median step time (ms)"), ("R", "images/s", "throughput (images/s)")):
        bars = axes[key].bar([str(row["N"]) for row in rows], [row[column] for row in rows], color=colors)
        axes[key].bar_label(bars, fmt="{:,.4g}", padding=2)
        axes[key].set(xlabel="world size N (devices)", ylabel=label, ymargin=0.15)
    lines = axes["D"].lines[:1] + axes["L"].lines
    save_panels(path, figure, title, {str(line.get_label()): line for line in lines})


def sweep(options: Options) -> None:
    """Runs the experiment, prints the table and writes the files."""
    start_platform("auto", "0-7")
    present = make_mesh().devices.flat
    sizes = parse_devices(options.world_sizes) or tuple(size for size in (1, 2, 4, 8) if size <= len(present))
    if not 0 < min(sizes) <= max(sizes) <= len(present):
        raise ValueError(
            f"world_sizes={options.world_sizes!r}: world sizes must be 1 to {len(present)}, the devices present"
        )
    if options.quick:
        sizes = sizes[:1] + sizes[1:][-1:]
    config = replace(preset_config("digits"), bn=options.bn, global_batch=options.global_batch)
    where = f"{present[0].platform} ({present[0].device_kind}), {os.cpu_count()} CPU cores"
    announce(where, options.out)
    if present[0].platform == "cpu":
        print("CPU devices share the cores: ideal is a relative throughput of 1 at every N, not an efficiency of 1")
        print("predicted for devices of their own, from what compiles, with data-sheet numbers of a CPU not measured")
    (seconds, losses), predicted = measure(config, sizes, 20 if options.quick else options.steps)
    difference = np.abs(losses / losses[0] - 1)
    rows = tabulate(sizes, seconds, predicted, difference, config.global_batch)
    write_rows(options.out / "sweep_world_size.csv", rows)
    title = f"digits preset, bn={config.bn}, global batch {config.global_batch}, {where}"
    draw(options.out / "sweep_world_size.png", title, rows, losses, difference)


if __name__ == "__main__":
    main(sweep, Options)
