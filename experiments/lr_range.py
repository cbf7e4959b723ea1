"""Which learning rate does a model bear? One short run in which it grows from step to step.

Source: Smith, "Cyclical Learning Rates for Training Neural Networks", 2017.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.figure import Figure
from report import Common, Row, announce, hardware, main, progress, save_axes, write_rows

from trjax.config.presets import preset_config
from trjax.config.run import Config
from trjax.data.batches import count_batches, train_batches
from trjax.data.sources import describe, load
from trjax.mesh import make_mesh, start_platform
from trjax.step.compile import compile_program
from trjax.step.plan import NUM_SCORES
from trjax.step.program import make_program

DIVERGED = 4.0
"""Times the smallest loss so far at which the run ends."""
SMOOTHING = 0.9
"""Share of the old mean in the mean of the losses."""


@dataclass(frozen=True)
class Options(Common):
    """Train with a learning rate that grows from step to step, and report which rates are worth trying."""

    preset: str = "digits"
    """Preset to train; its schedule of learning rates is not used."""
    data_root: str = ""
    """Folder of the preset's data, if it needs one."""
    devices: str = "0"
    """Devices to train on, as for `python -m trjax.train`."""
    platform: Literal["cpu", "cuda"] = "cpu"
    """Platform of the devices."""
    first: float = 1e-4
    """Learning rate of the first step."""
    last: float = 10.0
    """Learning rate of the last step."""
    steps: int = 300
    """Steps to train, one for each rate."""
    quick: bool = False
    """Train half of the steps, with a narrower model."""


def measure(config: Config, rates: np.ndarray) -> list[Row]:
    """Trains a step with each rate, until the loss runs away, and returns a row for each."""
    per_epoch = count_batches(describe(config.data).train_examples, config.global_batch, config.last_batch)
    config = replace(config, epochs=max(config.epochs, -(-len(rates) // per_epoch)))  # a rate for each step
    program = compile_program(make_program(config, make_mesh(config.devices)))
    state, (source, _) = program.init(), load(config.data)
    votes, mean, least = program.votes(False), 0.0, math.inf
    schedule = np.resize(rates, program.num_steps).astype(np.float32)
    rows: list[Row] = []
    for step, batch in enumerate(train_batches(source, config.global_batch, config.seed, 0, len(rates))):
        state, outcome = program.train_step(state, program.place_train(batch), schedule, votes)
        scores = np.asarray(outcome, np.float64)[:NUM_SCORES]
        loss = float(scores[0] / max(scores[3], 1))
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        smooth = mean / (1 - SMOOTHING ** (step + 1))
        if not math.isfinite(loss) or smooth > DIVERGED * least:
            break
        least = min(least, smooth)
        rows.append(
            {"step": step, "rate": float(f"{rates[step]:.6g}"), "loss": round(loss, 5), "mean": round(smooth, 5)}
        )
    return rows


def suggest(rows: Sequence[Row]) -> tuple[float, float]:
    """Returns the rate at which the mean loss falls fastest, over the logarithm of the rate, and that of the least."""
    means = np.array([row["mean"] for row in rows])
    steepest = int(np.argmin(np.gradient(means))) if len(rows) > 1 else 0
    return rows[steepest]["rate"], rows[int(np.argmin(means))]["rate"]


def draw(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draws the loss over the rate."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    rates = [row["rate"] for row in rows]
    axes.plot(rates, [row["loss"] for row in rows], color="#9ecae1", linewidth=1, label="loss of each step")
    axes.plot(rates, [row["mean"] for row in rows], color="#08519c", label="running mean")
    for rate, style, label in zip(suggest(rows), ("--", ":"), ("falls fastest", "least"), strict=True):
        axes.axvline(rate, color="black", linestyle=style, linewidth=1, label=f"{label}: {rate:.3g}")
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("training loss")
    axes.grid(alpha=0.3)
    axes.legend()
    save_axes(path, figure, axes, title)


def run(options: Options) -> None:
    """Runs the experiment, prints the table and writes the files."""
    if not 0 < options.first < options.last <= 1e6 or options.steps < 10:
        raise ValueError(
            f"first={options.first}, last={options.last}, steps={options.steps}: rates must grow, in 10 steps"
        )
    config, steps = preset_config(options.preset), options.steps
    if options.quick:
        config, steps = replace(config, model=replace(config.model, width=4)), steps // 2
    config = replace(config, devices=options.devices, data=replace(config.data, root=options.data_root))
    start_platform(options.platform, options.devices)
    announce(hardware(), options.out)
    rows = measure(config, np.geomspace(options.first, options.last, steps))
    if len(rows) < 2:
        raise ValueError(f"first={options.first}: the loss runs away at once; begin lower")
    write_rows(options.out / "lr_range.csv", rows[:: max(len(rows) // 50, 1)])
    fastest, least = suggest(rows)
    title = f"{options.preset}, {config.optim.kind}, global batch {config.global_batch}: {len(rows)} of {steps} steps"
    draw(options.out / "lr_range.png", title, rows)
    progress(title)
    print(f"the loss falls fastest at {fastest:.3g}, and is least at {least:.3g}: a peak between them is worth trying")


if __name__ == "__main__":
    main(run, Options)
