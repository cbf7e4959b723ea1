"""What does saving cost a run: written while it trains, and for comparison while it waits?

One model trains the same steps three ways in turns: without checkpoints, with one every so many steps beside the
training, and with as many for which it waits. On the CPU the writer takes cores from the training; beside a GPU it
takes none of it.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import jax
import numpy as np
from matplotlib.figure import Figure
from report import Common, Row, announce, hardware, main, progress, require_positive, save_axes, write_rows

from trjax.config.presets import preset_config
from trjax.config.run import Config
from trjax.data.batches import train_batches
from trjax.data.sources import load
from trjax.mesh import make_mesh, start_platform
from trjax.run.checkpoints import CheckpointInfo, Checkpoints
from trjax.step.compile import compile_program
from trjax.step.program import Program, make_program

Way = Literal["none", "beside", "waiting"]
WAYS: tuple[Way, ...] = ("none", "beside", "waiting")


@dataclass(frozen=True)
class Options(Common):
    """Train with checkpoints written during the training, with waiting for each checkpoint, and without any."""

    repeats: int = 5
    """Measured turns of each way, after one turn to warm up."""
    epochs_per_save: int = 1
    """Epochs of the digits between two checkpoints."""
    quick: bool = False
    """Measure two turns of a narrower model."""


def train(config: Config, program: Program, state: Any, way: Way, every: int) -> tuple[Any, float, float]:
    """Returns the state after three intervals of steps, the seconds that they took, and those inside of `save`."""
    source, _ = load(config.data)
    rates, votes = np.full(program.num_steps, 0.01, np.float32), program.votes(False)
    with TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), print)
        saving, start = 0.0, time.perf_counter()
        for step, batch in enumerate(train_batches(source, config.global_batch, 0, 0, 3 * every), start=1):
            state, outcome = program.train_step(state, program.place_train(batch), rates, votes)
            jax.block_until_ready(outcome)
            if way != "none" and step % every == 0:
                began = time.perf_counter()
                checkpoints.save(state, CheckpointInfo(step, {}, asdict(config), None))
                if way == "waiting":
                    checkpoints.wait()
                saving += time.perf_counter() - began
        checkpoints.wait()
        return state, time.perf_counter() - start, saving


def measure(config: Config, every: int, repeats: int) -> list[Row]:
    """Returns a row for each way; they take turns, and the median of the turns is told."""
    program = compile_program(make_program(config, make_mesh("0")))
    state = program.init()
    state_mb = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 1e6
    times = {way: list[tuple[float, float]]() for way in WAYS}
    for turn in range(repeats + 1):
        for way in WAYS:
            state, *found = train(config, program, state, way, every)
            if turn:  # the first warms up
                times[way].append((found[0], found[1]))
        progress(f"turn {turn} of {repeats}")
    plain = float(np.median([total for total, _ in times["none"]]))
    rows: list[Row] = []
    for way in WAYS:
        total, saving = np.median(times[way], axis=0)
        ratios = [own / other for (own, _), (other, _) in zip(times[way], times["none"], strict=True)]
        row: Row = {"model": f"{config.model.arch}, width {config.model.width or 16}", "state MB": round(state_mb, 2)}
        row |= {"steps a save": every, "saving": way, "step ms": round(1e3 * total / (3 * every), 2)}
        row |= {"in save, ms each": round(1e3 * saving / 3, 2), "in save, % of a step": round(100 * saving / plain, 2)}
        rows.append(row | {"cost %": round(100 * (float(np.median(ratios)) - 1), 2)})
    return rows


def draw(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draws what each way costs: in all, and inside of the training's own thread."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    saved = [row for row in rows if row["saving"] != "none"]
    at = np.arange(len(saved))
    for shift, column, color in ((-0.2, "cost %", "#1f77b4"), (0.2, "in save, % of a step", "#ff7f0e")):
        label = {"cost %": "the whole run", "in save, % of a step": "the training's own thread, in `save`"}[column]
        bars = axes.bar(at + shift, [row[column] for row in saved], 0.36, color=color, label=label)
        axes.bar_label(bars, fmt="%.2f", padding=2)
    axes.axhline(2, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(at, [row["saving"] for row in saved])
    axes.set_ylabel("% of the training")
    axes.margins(y=0.15)
    axes.legend()
    save_axes(path, figure, axes, title)


def run(options: Options) -> None:
    """Runs the experiment, prints the table and writes the files."""
    require_positive(repeats=options.repeats, epochs_per_save=options.epochs_per_save)
    start_platform("cpu", "0")
    config, repeats = preset_config("digits"), options.repeats
    if options.quick:
        config, repeats = replace(config, model=replace(config.model, width=4)), 2
    announce(hardware(), options.out)
    steps_per_epoch = make_program(config, make_mesh("0")).steps_per_epoch
    rows = measure(config, options.epochs_per_save * steps_per_epoch, repeats)
    write_rows(options.out / "checkpoint_cost.csv", rows)
    title = f"{rows[0]['model']}, {rows[0]['state MB']} MB, a checkpoint every {rows[0]['steps a save']} steps"
    draw(options.out / "checkpoint_cost.png", f"{title}, {os.cpu_count()} CPU cores", rows)


if __name__ == "__main__":
    main(run, Options)
