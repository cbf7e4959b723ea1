"""Does training give the same numbers at every world size, and what does a step cost there?

Trains the digits preset from the same seed at several world sizes, in turns within one process, so that the
machine's noise hits all alike. Prints a table and writes `sweep_world_size.csv` and `.png`.
"""

import csv
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import tyro
from matplotlib import colormaps
from matplotlib.figure import Figure

from trjax.config import Config
from trjax.data.batches import count_batches, train_batches
from trjax.data.sources import Source, load
from trjax.mesh import SPLIT, make_mesh, placement, start_platform
from trjax.optim import make_learning_rates
from trjax.presets import preset_config
from trjax.program import Program, compile_program, make_program
from trjax.records import format_table

WARMUP_STEPS = 3  # left out of the times: the first calls fill caches and pools
ROUND_STEPS = 10  # of one world size before the next has its turn


@dataclass(frozen=True)
class Options:
    """Train at several world sizes; compare the losses and time the steps."""

    devices: str = ""
    """World sizes, as in 1,2,3; the first is what the others are compared with. Empty: those of 1,2,4,8 present."""
    steps: int = 150
    """Steps at each world size."""
    quick: bool = False
    """20 steps in place of `steps`."""
    global_batch: int = 96
    """Examples per step over all devices."""
    bn: Literal["sync", "local"] = "sync"
    """Local is the counter-check: it trains another function at every world size, and the losses must differ."""
    out: Path = Path("results")
    """Folder for the CSV and the figure."""


def choose_world_sizes(text: str) -> list[int]:
    """Returns the world sizes asked for, or those of 1, 2, 4, 8 that fit.

    Raises:
        ValueError: not a list of different counts of devices that are present.
    """
    present = len(jax.devices())
    if not text:
        return [size for size in (1, 2, 4, 8) if size <= present]
    parts = [part.strip() for part in text.split(",")]
    sizes = [int(part) for part in parts if part.isascii() and part.isdigit()]
    if len(sizes) < len(parts) or 0 in sizes or len(set(sizes)) < len(sizes):
        raise ValueError(f"devices={text!r}: must be different positive counts; write 1,2,3")
    if max(sizes) > present:
        platform = jax.default_backend()
        raise ValueError(f"devices={text!r}: there are {present} {platform} devices; ask for at most {present}")
    return sizes


def train_steps(config: Config, program: Program, world_size: int, source: Source) -> Iterator[tuple[float, float]]:
    """Yields the seconds of each step, results awaited and batch placed beforehand, and its mean loss."""
    steps_per_epoch = count_batches(len(source), config.global_batch)
    rates = make_learning_rates(config.optim, config.epochs, steps_per_epoch, config.global_batch)
    split = placement(make_mesh(f"0-{world_size - 1}"), SPLIT)
    state = program.init()
    for step, batch in enumerate(train_batches(source, config.global_batch, config.seed, 0, len(rates))):
        placed, epoch = jax.block_until_ready(jax.device_put(batch, split)), np.int32(step // steps_per_epoch)
        start = time.perf_counter()
        state, results = jax.block_until_ready(program.train_step(state, placed, rates[step], epoch))
        seconds = time.perf_counter() - start
        yield seconds, float(results[0] / results[3])


def measure(config: Config, sizes: Sequence[int], num_steps: int) -> np.ndarray:
    """Returns the seconds and the loss of every step, float64, shape (sizes, steps, 2).

    Raises:
        ValueError: the global batch is not divisible by a world size, or the steps are too few or too many.
    """
    source, _ = load(config.data)
    longest = config.epochs * count_batches(len(source), config.global_batch)
    if not WARMUP_STEPS < num_steps <= longest:
        raise ValueError(f"steps={num_steps}: must be {WARMUP_STEPS + 1} to {longest}, the length of the preset's run")
    programs = [make_program(config, make_mesh(f"0-{size - 1}")) for size in sizes]
    runs = []
    for size, program in zip(sizes, programs, strict=True):
        start = time.perf_counter()
        runs.append(train_steps(config, compile_program(program), size, source))
        print(f"compiled for N={size} in {time.perf_counter() - start:.1f} s", flush=True)
    measured: list[list[tuple[float, float]]] = [[] for _ in sizes]
    for start_step in range(0, num_steps, ROUND_STEPS):
        for run, so_far in zip(runs, measured, strict=True):
            so_far += islice(run, min(ROUND_STEPS, num_steps - start_step))
    return np.array(measured)


def tabulate(sizes: Sequence[int], measured: np.ndarray, global_batch: int) -> list[dict[str, float]]:
    """Returns a row for each world size; differences are relative, of the loss to the first N's at the same step."""
    rows: list[dict[str, float]] = []
    for size, (seconds, losses) in zip(sizes, np.moveaxis(measured, 2, 1), strict=True):
        quartile1, median, quartile3 = np.quantile(seconds[WARMUP_STEPS:], [0.25, 0.5, 0.75])
        difference = np.abs(losses / measured[0, :, 1] - 1)
        gain = global_batch / median / rows[0]["images/s"] if rows else 1.0
        numbers = {
            "step ms": median * 1e3,
            "quartile 1": quartile1 * 1e3,
            "quartile 3": quartile3 * 1e3,
            "images/s": global_batch / median,
            "efficiency": gain * sizes[0] / size,
            "relative throughput": gain,
            "final loss": losses[-1],
            "step 1 diff": difference[0],
            "max diff": difference.max(),
        }
        at_step = {"at step": int(difference.argmax()) + 1}
        rows.append({"N": size} | {name: float(f"{value:.4g}") for name, value in numbers.items()} | at_step)
    return rows


def draw(path: Path, title: str, sizes: Sequence[int], measured: np.ndarray, rows: Sequence[dict[str, float]]) -> None:
    """Draws the loss curves over their relative differences, and the costs of a step."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplot_mosaic([["loss", "step"]] * 2 + [["loss", "rate"], ["diff", "rate"]], width_ratios=[3, 2])
    colors = colormaps["viridis"](np.linspace(0, 0.9, len(sizes)))
    steps, losses = np.arange(1, measured.shape[1] + 1), measured[..., 1]
    for index, (size, color) in enumerate(zip(sizes, colors, strict=True)):
        width = 1 + 2 * (len(sizes) - 1 - index)  # the later the thinner, so that each shows under the next
        axes["loss"].semilogy(steps, losses[index], color=color, linewidth=width, label=f"N = {size}")
        difference = np.abs(losses[index] / losses[0] - 1)
        axes["diff"].semilogy(steps, np.where(difference > 0, difference, np.nan), color=color, linewidth=1)
    axes["diff"].axhline(np.finfo(np.float32).eps, color="gray", linestyle=":")
    axes["diff"].sharex(axes["loss"])
    axes["loss"].tick_params(labelbottom=False)
    axes["loss"].set(ylabel="mean training loss (nats)", title="loss of each step's batch")
    axes["diff"].set(xlabel="step", ylabel=f"relative difference\nto N = {sizes[0]}")
    axes["loss"].legend()
    names = [str(size) for size in sizes]
    for axis, column in (("step", "step ms"), ("rate", "images/s")):
        bars = axes[axis].bar(names, [row[column] for row in rows], color=colors)
        axes[axis].bar_label(bars, fmt="{:,.4g}", padding=2)
        axes[axis].margins(y=0.15)
    axes["step"].set(ylabel="median step time (ms)", title="cost of a step")
    axes["rate"].set(xlabel="world size N (devices)", ylabel="images/s")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def sweep(options: Options) -> None:
    """Runs the experiment, prints the table and writes the files."""
    start_platform("auto", "0-7")
    sizes = choose_world_sizes(options.devices)
    config = replace(preset_config("digits"), bn=options.bn, global_batch=options.global_batch)
    device = jax.devices()[0]
    print(f"$ {shlex.join(['python', *sys.argv])}")
    where = f"{device.platform} ({device.device_kind}), {os.cpu_count()} CPU cores"
    print(f"jax {version('jax')}, trjax {version('trjax')}, {where}")
    if device.platform == "cpu":
        print("CPU devices share the cores: ideal is a relative throughput of 1 at every N, not an efficiency of 1")
    options.out.mkdir(parents=True, exist_ok=True)
    measured = measure(config, sizes, 20 if options.quick else options.steps)
    rows = tabulate(sizes, measured, config.global_batch)
    print(format_table(list(rows[0]), [list(row.values()) for row in rows]))
    with (options.out / "sweep_world_size.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    title = f"digits preset, bn={config.bn}, global batch {config.global_batch}, {where}"
    draw(options.out / "sweep_world_size.png", title, sizes, measured, rows)


def main() -> int:
    """Runs the command and returns its exit code: 0 done, 2 the user's mistake."""
    try:
        sweep(tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
