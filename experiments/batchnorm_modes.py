"""What do BatchNorm's statistics over the devices buy when each device has few examples, and what do they cost?

`local` normalises with each device's own batch and averages the running statistics, `rank0` keeps those of the first
device, as DistributedDataParallel does, `sync` normalises with the global batch. Test accuracy after a few epochs of
the digits preset on eight devices; collectives of the compiled step; step time measured here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import jax
import numpy as np
from jax.stages import Compiled
from machines import without_augmentation
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report import Common, Row, announce, hardware, main, progress, require_positive, save_panels, write_rows
from steps import WARMUP_STEPS, train_run

from trjax.config.presets import preset_config
from trjax.config.run import Config
from trjax.data.batches import count_batches, eval_batches
from trjax.data.sources import load
from trjax.mesh import make_mesh, start_platform
from trjax.step.compile import compile_program
from trjax.step.evaluation import init_totals
from trjax.step.program import Program, make_program
from trjax.step.state import TrainState
from trjax.xla.hlo import parse_module
from trjax.xla.operations import list_operations

MODES: tuple[Literal["local", "sync", "rank0"], ...] = ("local", "sync", "rank0")
COLORS = dict(zip(MODES, ("#1f77b4", "#ff7f0e", "#2ca02c"), strict=True))
DEVICES = 8


@dataclass(frozen=True)
class Options(Common):
    """Train the digits preset with each BatchNorm mode at small local batches; compare accuracy and cost."""

    global_batches: tuple[int, ...] = (32, 96)
    """Examples of a step, over eight devices: one or more sizes."""
    epochs: int = 10
    """Epochs of each run."""
    seeds: int = 3
    """Runs of each mode, each with its own initial parameters and order of the data."""
    quick: bool = False
    """Train one seed for two epochs without augmentation, with the first batch size only."""


@dataclass(frozen=True)
class Outcome:
    """One run: mean loss of the first and of the last epoch's batches, test loss and top-1, seconds of the steps."""

    first_loss: float
    train_loss: float
    test_loss: float
    test_top1: float
    seconds: np.ndarray


def run(config: Config, program: Program, seed: int, initial: TrainState) -> Outcome:
    """Trains from a seed's state in a seed's order, and tests; the program's own seed varies nothing here."""
    train_source, test_source = load(config.data)
    steps_per_epoch = count_batches(len(train_source), config.global_batch)
    state, seconds, losses = initial, [], []
    for state, taken, mean_loss in train_run(config, program, initial, seed):  # noqa: B007
        seconds.append(taken)
        losses.append(mean_loss)
    totals = init_totals(program.mesh)
    for batch in eval_batches(test_source, config.global_batch):
        totals = program.accumulate(totals, state.params, state.batch_stats, program.place(batch))
    loss, top1, _, count = np.asarray(program.reduce_totals(totals), np.float64)
    first_loss, train_loss = (float(np.mean(part)) for part in (losses[:steps_per_epoch], losses[-steps_per_epoch:]))
    return Outcome(first_loss, train_loss, loss / count, top1 / count, np.array(seconds))


def tabulate(config: Config, program: Program, outcomes: Sequence[Outcome], local_ms: float) -> dict[str, Any]:
    """Returns the columns of one mode at one batch; the step is compared with `local_ms`, 0: with itself."""
    operations = list_operations(parse_module(str(cast(Compiled, program.train_step).as_text())))
    reduced = [operation.size_bytes for operation in operations if operation.collective]
    step_ms = float(np.median(np.concatenate([outcome.seconds[WARMUP_STEPS:] for outcome in outcomes]))) * 1e3
    top1 = [100 * outcome.test_top1 for outcome in outcomes]
    return {
        "global batch": config.global_batch,
        "local batch": config.global_batch // DEVICES,
        "bn": config.bn,
        "top-1 %": round(float(np.mean(top1)), 2),
        "lowest": round(min(top1), 2),
        "highest": round(max(top1), 2),
        "test loss": round(float(np.mean([outcome.test_loss for outcome in outcomes])), 4),
        "epoch 1 loss": round(float(np.mean([outcome.first_loss for outcome in outcomes])), 6),
        "train loss": round(float(np.mean([outcome.train_loss for outcome in outcomes])), 4),
        "collectives": len(reduced),
        "reduced kB": round(sum(reduced) / 1e3, 1),
        "step ms": round(step_ms, 1),
        "step / local": round(step_ms / (local_ms or step_ms), 2),
    }


def compare_modes(config: Config, seeds: int) -> list[Row]:
    """Returns a row for each mode; the modes take turns, so that the machine's noise hits all alike."""
    configs = [replace(config, bn=mode) for mode in MODES]
    programs = []
    for one in configs:
        progress(f"global batch {one.global_batch}, bn={one.bn}: compiling ...")
        programs.append(compile_program(make_program(one, make_mesh(f"0-{DEVICES - 1}"))))
    outcomes: list[list[Outcome]] = [[] for _ in MODES]
    for seed in range(seeds):
        initial = jax.device_get(make_program(replace(config, seed=seed), programs[0].mesh).init())  # for all modes
        for one, program, own in zip(configs, programs, outcomes, strict=True):
            own.append(run(one, program, seed, initial))
            progress(f"  seed {seed}, bn={one.bn}: top-1 {own[-1].test_top1:.2%}")
    rows: list[Row] = []
    for one, program, own in zip(configs, programs, outcomes, strict=True):
        rows.append(tabulate(one, program, own, rows[0]["step ms"] if rows else 0.0))
    return rows


def _draw_bars(axes: Axes, rows: Sequence[Row], column: str, label: str, spread: bool = False) -> None:
    batches = list(dict.fromkeys(row["global batch"] for row in rows))
    for row in rows:
        place = batches.index(row["global batch"]) + 0.27 * (MODES.index(row["bn"]) - 1)
        bars = axes.bar(place, row[column], 0.25, color=COLORS[row["bn"]])
        if spread:
            whiskers = [[row[column] - row["lowest"]], [row["highest"] - row[column]]]
            axes.errorbar(place, row[column], whiskers, color="black", capsize=3)
        axes.bar_label(bars, [f"{row[column]:g}"], label_type="center" if spread else "edge", fontsize=8, padding=2)
    locals_ = [row["local batch"] for row in rows if row["bn"] == "local"]
    names = [f"{batch} ({local} a device)" for batch, local in zip(batches, locals_, strict=True)]
    axes.set_xticks(range(len(batches)), names)
    axes.set(xlabel="global batch", ylabel=label)
    axes.margins(y=0.12)


def draw(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draws accuracy, test loss, collectives and step time of the modes, a group of bars for each batch."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    top1, loss, calls, step = figure.subplots(2, 2).flat
    _draw_bars(top1, rows, "top-1 %", "test top-1 (%), range of seeds (cut below)", spread=True)
    top1.set_ylim(max(0.0, 2 * min(row["lowest"] for row in rows) - 101), 100.5)
    _draw_bars(loss, rows, "test loss", "test loss (nats)")
    _draw_bars(calls, rows, "collectives", "collectives of a step")
    _draw_bars(step, rows, "step ms", "median step time here (ms)")
    handles = [top1.patches[MODES.index(mode)] for mode in MODES]
    save_panels(path, figure, title, {f"bn={mode}": bar for mode, bar in zip(MODES, handles, strict=True)})


def sweep(options: Options) -> None:
    """Runs the experiment, prints the table and writes the files."""
    require_positive(epochs=options.epochs, seeds=options.seeds)
    if not options.global_batches:
        raise ValueError("global_batches: must have one or more")
    if options.quick:
        options = replace(options, epochs=2, seeds=1, global_batches=options.global_batches[:1])
    start_platform("auto", f"0-{DEVICES - 1}")
    announce(hardware(), options.out)
    preset = preset_config("digits")
    optim = replace(preset.optim, scale_from_batch=preset.global_batch, warmup_epochs=1)
    config = replace(preset, epochs=options.epochs, optim=optim)
    config = without_augmentation(config) if options.quick else config
    rows = []
    for global_batch in options.global_batches:
        rows += compare_modes(replace(config, global_batch=global_batch), options.seeds)
    write_rows(options.out / "batchnorm_modes.csv", rows)
    title = f"digits, {options.epochs} epochs, {options.seeds} seeds, {DEVICES} devices: {hardware()}"
    draw(options.out / "batchnorm_modes.png", title, rows)


if __name__ == "__main__":
    main(sweep, Options)
