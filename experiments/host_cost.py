"""What does the host cost: from the command to the first step, and for every step that it starts?

Starting: `python -m trjax.train` in a process of its own, until its records hold the first step; without a cache of
compiled programs, with an empty one, and with what the run before left there.
Dispatch: a program with the arguments and results of a train step that computes nothing, called again and again; what
is left is what JAX does for each of its arrays. `--steps-per-dispatch` shares one call among several steps.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from report import announce, hardware, main, progress, save_axes, write_rows
from serve_step import place_inputs

from trjax.config.command_line import parse_config
from trjax.mesh import make_mesh, start_platform
from trjax.step.program import make_program

SYNTHETIC = ["--data.source", "synthetic", "--data.train-examples", "64", "--data.test-examples", "32",
             "--optim.warmup-epochs", "0", "--platform", "cpu"]  # fmt: skip
MODELS = {
    "digits": ["--platform", "cpu", "--optim.warmup-epochs", "0"],
    "ResNet-20": [*SYNTHETIC, "--model.arch", "resnet20", "--data.image-shape", "32", "32", "3"],
    "ResNet-50": [*SYNTHETIC, "--model.arch", "resnet50", "--data.image-shape", "64", "64", "3"],
}
"""Options of the runs that are started."""
WAYS = {"no cache": ["--no-keep-compiled"], "first start": [], "second start": []}
ONE_EPOCH = ["--global-batch", "32", "--devices", "0", "--epochs", "1", "--log-every", "1"]


@dataclass(frozen=True)
class Options:
    """Measure what starting a run takes, and starting a step."""

    models: tuple[str, ...] = tuple(MODELS)
    """Which of them to start."""
    repeats: int = 3
    """Starts of each kind; the median is told."""
    quick: bool = False
    """The digits once."""
    out: Path = Path("results")
    """Folder for the CSV and the figure."""


def start(model: str, way: str, folder: Path) -> float:
    """Returns the seconds from the command to the first step of a new run in a folder."""
    workdir = folder / way.replace(" ", "-")
    options = [*MODELS[model], *WAYS[way], *ONE_EPOCH, "--workdir", str(workdir)]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    records, errors = workdir / "metrics.jsonl", folder / "errors"
    with errors.open("w") as said:
        began = time.perf_counter()
        run = subprocess.Popen([sys.executable, "-m", "trjax.train", *options],
                               stdout=subprocess.DEVNULL, stderr=said, env=environment)  # fmt: skip
        while not (records.is_file() and records.stat().st_size) and run.poll() is None:
            time.sleep(0.01)
        seconds = time.perf_counter() - began
        run.wait()
    if run.returncode:
        raise ValueError(f"{model}: {errors.read_text().strip()}")
    return seconds


def measure_starts(models: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """Returns a row for every model: the median seconds of each way."""
    rows = []
    for model in models:
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for repeat in range(repeats):
            with TemporaryDirectory() as folder:
                for way in WAYS:
                    seconds[way].append(start(model, way, Path(folder)))
            progress(f"{model}: start {repeat + 1} of {repeats}")
        medians = {way: float(np.median(found)) for way, found in seconds.items()}
        faster = medians["no cache"] / medians["second start"]
        rows.append({"what": f"start {model}", **{f"{way} s": round(value, 1) for way, value in medians.items()},
                     "times as fast": round(faster, 2)})  # fmt: skip
    return rows


def measure_dispatch(devices: int) -> dict[str, Any]:
    """Returns a row: microseconds of a call with the arguments and results of ResNet-20's step."""
    config = parse_config([*MODELS["ResNet-20"], "--devices", f"0-{devices - 1}", "--global-batch", "32"], "", "")
    mesh = make_mesh(config.devices)
    program = make_program(config, mesh)
    inputs = *place_inputs(config, program), program.votes(False)
    formats = program.layouts.formats
    nothing = jax.jit(
        lambda state, batch, rates, votes: (state, rates),
        in_shardings=(formats, *(jax.tree.map(lambda leaf: leaf.sharding, own) for own in inputs)),
        out_shardings=(formats, inputs[1].sharding),
        donate_argnums=0,
    )
    step, state, micros = nothing.lower(program.layouts.shape, *inputs).compile(), program.init(), []
    for _ in range(300):
        jax.block_until_ready(state)
        began = time.perf_counter()
        state, _ = step(state, *inputs)
        micros.append(1e6 * (time.perf_counter() - began))
    call = float(np.median(micros[50:]))
    return {"what": f"a call, {devices} device{'s' if devices > 1 else ''}", "arrays": len(jax.tree.leaves(state)),
            "us a call": round(call)}  # fmt: skip


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draws the starts."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    at = np.arange(len(rows))
    for shift, way, color in zip((-0.26, 0, 0.26), WAYS, ("#7f7f7f", "#ff7f0e", "#1f77b4"), strict=True):
        bars = axes.bar(at + shift, [row[f"{way} s"] for row in rows], 0.24, color=color, label=way)
        axes.bar_label(bars, fmt="%.1f", padding=2)
    axes.set_xticks(at, [row["what"].removeprefix("start ") for row in rows])
    axes.set_ylabel("seconds to the first step")
    axes.margins(y=0.15)
    axes.legend()
    save_axes(path, figure, axes, f"From the command to the first step, one device, {os.cpu_count()} CPU cores")


def run(options: Options) -> None:
    """Runs the experiment, prints the tables and writes the files."""
    if unknown := set(options.models) - set(MODELS):
        raise ValueError(f"models={sorted(unknown)}: unknown; known: {', '.join(MODELS)}")
    if options.repeats < 1:
        raise ValueError(f"repeats={options.repeats}: must be positive")
    start_platform("cpu", "0-7")
    announce(hardware(), options.out)
    starts = measure_starts(("digits",), 1) if options.quick else measure_starts(options.models, options.repeats)
    dispatches = [measure_dispatch(devices) for devices in ((1,) if options.quick else (1, 2, 8))]
    columns = dict.fromkeys([*starts[0], *dispatches[0]])
    write_rows(
        options.out / "host_cost.csv", [{name: row.get(name, "") for name in columns} for row in (*starts, *dispatches)]
    )
    draw(options.out / "host_cost.png", starts)


if __name__ == "__main__":
    main(run, Options)
