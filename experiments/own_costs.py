"""What does trjax itself cost: to start a run, to launch a step, and in its own parts as models grow?

starts: `python -m trjax.train` in a process of its own, until its records hold the first step; without a cache of
compiled programs, with an empty cache, and with the cache that the run before left there.
calls: a program that computes nothing, with the arguments and results of ResNet-20's step. The time of a call is what
JAX does for each array. `--steps-per-dispatch` shares one call among several steps.
parts: plan, tracing, reading the compiled program, checkpoints. ResNets, and chains of many small segments, each a
convolution with its BatchNorm; bfloat16, compiled for two H100s, beside what the compiler takes. trjax's parts should
grow as the number of tensors does, or as their bytes.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from machines import h100s, mesh_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report import (
    Common,
    Row,
    announce,
    hardware,
    main,
    progress,
    require_positive,
    save_panels,
    style_axes,
    write_tables,
)
from steps import place_inputs

from trjax.config.run import Config, DataConfig
from trjax.mesh import make_mesh, start_platform
from trjax.models.chain import Chain
from trjax.models.resnet import ConvNorm, Head, StemSegment, make_resnet
from trjax.run.checkpoints import CheckpointInfo, decode, encode
from trjax.step.compile import lower_step
from trjax.step.expected import expect
from trjax.step.layouts import conv_order_of
from trjax.step.program import Program, make_program, shape_run
from trjax.step.rules import analyze_step
from trjax.step.run_plan import plan_run
from trjax.xla.compiled import compile_lowered
from trjax.xla.hlo import parse_module
from trjax.xla.operations import list_operations

Value = TypeVar("Value")
NOISE = DataConfig(source="synthetic", image_shape=(32, 32, 3), train_examples=64, test_examples=32)
CONFIG = Config(global_batch=32, epochs=1, data=NOISE)
SYNTHETIC = "--data.source synthetic --data.train-examples 64 --data.test-examples 32"
MODELS = {
    "digits": "",
    "ResNet-20": f"{SYNTHETIC} --model.arch resnet20 --data.image-shape 32 32 3",
    "ResNet-50": f"{SYNTHETIC} --model.arch resnet50 --data.image-shape 64 64 3",
}
"""Options of the runs to start."""
WAYS = {"no cache": ("#7f7f7f", "--no-keep-compiled"), "first start": ("#ff7f0e", ""), "second start": ("#1f77b4", "")}
"""Colors and options of the ways to start."""
ONE_EPOCH = "--platform cpu --devices 0 --global-batch 32 --epochs 1 --optim.warmup-epochs 0 --log-every 1"
GROWING = {"plan": "plan ms", "tracing": "trace s", "reading the program": "read s"}
"""Columns that should grow as the tensors do; checkpoints grow with bytes too."""


@dataclass(frozen=True)
class Options(Common):
    """Measure starts of runs, calls of steps, and trjax's own parts for models of many sizes."""

    models: tuple[str, ...] = tuple(MODELS)
    """Runs to start: digits, ResNet-20, ResNet-50."""
    repeats: int = 3
    """Starts of each kind; the table has their median."""
    resnets: tuple[str, ...] = ("resnet18", "resnet50", "resnet152")
    """ResNets whose parts are timed."""
    segments: tuple[int, ...] = (30, 100, 300)
    """Lengths of the chains whose parts are timed."""
    quick: bool = False
    """Start the digits once, call on one device, and time a small ResNet and a short chain."""


def start(model: str, way: str, folder: Path) -> float:
    """Returns the seconds from the command to the first step of a new run in a folder."""
    workdir = folder / way.replace(" ", "-")
    options = f"{MODELS[model]} {WAYS[way][1]} {ONE_EPOCH}".split()
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    records, errors = workdir / "metrics.jsonl", folder / "errors"
    command = [sys.executable, "-m", "trjax.train", *options, "--workdir", str(workdir)]
    with errors.open("w") as said:
        began = time.perf_counter()
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=environment)
        while not (records.is_file() and records.stat().st_size) and run.poll() is None:
            time.sleep(0.01)
        seconds = time.perf_counter() - began
        run.wait()
    if run.returncode:
        raise ValueError(f"{model}: {errors.read_text().strip()}")
    return seconds


def measure_starts(model: str, repeats: int) -> Row:
    """Returns the row of a model: the median seconds of each way to start."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(repeats):
        with TemporaryDirectory() as folder:
            for way in WAYS:
                seconds[way].append(start(model, way, Path(folder)))
        progress(f"{model}: start {repeat + 1} of {repeats}")
    medians = {f"{way} s": float(np.median(found)) for way, found in seconds.items()}
    faster = medians["no cache s"] / medians["second start s"]
    row = {"what": f"start {model}"} | {name: round(median, 1) for name, median in medians.items()}
    return row | {"times as fast": round(faster, 2)}


def measure_call(devices: int) -> Row:
    """Returns a row: microseconds of a call with the arguments and results of ResNet-20's step."""
    config = replace(CONFIG, model=replace(CONFIG.model, arch="resnet20"), optim=replace(CONFIG.optim, warmup_epochs=0))
    program = make_program(config, make_mesh(f"0-{devices - 1}"))
    inputs, formats = place_inputs(config, program), program.layouts.formats
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
    what = f"a call, {devices} device{'s' if devices > 1 else ''}"
    return {"what": what, "arrays": len(jax.tree.leaves(state)), "us a call": round(float(np.median(micros[50:])))}


class Layer(nn.Module):
    """A segment of a chain."""

    features: int = 16

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array, keys: jax.Array) -> jax.Array:
        """Returns the shape of `x`."""
        return ConvNorm(self.features, 3, dtype=x.dtype, rectified=True, name="layer")(x, train=train, mask=mask)


def make_chain(num_segments: int) -> Chain:
    """Returns a chain of that many segments, stem and head included."""
    layers = {f"layer{index}": Layer() for index in range(num_segments - 2)}
    return {"stem": StemSegment(16, "cifar", jnp.dtype("bfloat16")), **layers, "head": Head(10)}


def timed(do: Callable[[], Value]) -> tuple[Value, float]:
    """Returns the result of a function, and the seconds that it takes."""
    began = time.perf_counter()
    done = do()
    return done, time.perf_counter() - began


def save_and_load(program: Program) -> float:
    """Returns the seconds to make and to read the bytes of a checkpoint."""
    state: Any = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), program.layouts.saved_shape)
    data, there = timed(lambda: encode(state, CheckpointInfo(0, {}, {}, None)))
    _, back = timed(lambda: decode(data, program.layouts.saved_shape, "the checkpoint"))
    return there + back


def measure_parts(name: str, chain: Chain) -> Row:
    """Returns the row of a model: its sizes, and what each part takes."""
    progress(f"{name} ...")
    config, machine = replace(CONFIG, precision="bfloat16"), h100s("1x2")
    shapes, shape_seconds = timed(lambda: shape_run(config, chain))
    plan, plan_seconds = timed(lambda: plan_run(config, shapes, machine, conv_order_of("gpu")))
    program = make_program(config, mesh_of(machine), chain)
    lowered, trace_seconds = timed(lambda: lower_step(program))
    compiled, compile_seconds = timed(lambda: compile_lowered(lowered))
    _, parse_seconds = timed(lambda: list_operations(parse_module(compiled.text)))  # which compile_lowered does too
    expected = expect(config, plan, machine.topology)
    found, read_seconds = timed(lambda: analyze_step(compiled, machine, config.global_batch, expected))
    saved_seconds = save_and_load(make_program(config, make_mesh("0"), chain))
    millions = sum(leaf.size for leaf in jax.tree.leaves(shapes.params)) / 1e6
    row: Row = {"model": name, "segments": len(chain), "tensors": len(plan.regions)}
    row |= {"parameters M": round(millions, 2), "kernels": found.summary.kernels}
    row |= {"shapes s": round(shape_seconds, 2), "plan ms": round(1e3 * plan_seconds, 1)}
    row |= {"trace s": round(trace_seconds, 2), "compile s": round(compile_seconds - parse_seconds, 1)}
    row |= {"read s": round(parse_seconds + read_seconds, 2)}
    return row | {"checkpoint ms": round(1e3 * saved_seconds, 1)}


def _draw_starts(axes: Axes, rows: Sequence[Row]) -> None:
    at = np.arange(len(rows))
    for shift, (way, (color, _)) in zip((-0.26, 0, 0.26), WAYS.items(), strict=True):
        bars = axes.bar(at + shift, [row[f"{way} s"] for row in rows], 0.24, color=color, label=way)
        axes.bar_label(bars, fmt="%.1f", padding=2)
    axes.set_xticks(at, [row["what"].removeprefix("start ") for row in rows])
    axes.set_ylabel("seconds to the first step")
    axes.margins(y=0.15)
    style_axes(axes, "From the command to the first step, one device")


def _draw_growth(axes: Axes, rows: Sequence[Row]) -> None:
    """Draws what grows, by the number of tensors, each as a multiple of the smallest model's; linear is dashed."""
    rows = sorted(rows, key=lambda row: row["tensors"])
    tensors = [row["tensors"] for row in rows]
    for label, column in GROWING.items():
        axes.plot(tensors, [row[column] / max(rows[0][column], 1e-9) for row in rows], marker="o", label=label)
    axes.plot(tensors, [count / tensors[0] for count in tensors], "--", color="black", label="linear in tensors")
    axes.set(xscale="log", yscale="log", xlabel="tensors in the plan", ylabel=f"times that of {rows[0]['model']}")
    style_axes(axes, "trjax's own parts, as models grow")


def run(options: Options) -> None:
    """Runs the experiment, prints the tables and writes the files."""
    if unknown := set(options.models) - set(MODELS):
        raise ValueError(f"models={sorted(unknown)}: unknown; known: {', '.join(MODELS)}")
    if min(options.segments, default=3) < 3:
        raise ValueError(f"segments={options.segments}: must be 3 or more, stem and head included")
    require_positive(repeats=options.repeats)
    start_platform("cpu", "0-7")
    announce(f"{hardware()}; parts compiled for 2 H100, not run", options.out)
    counts: tuple[int, ...] = (1, 2, 8)
    if options.quick:
        options = replace(options, models=("digits",), repeats=1, resnets=("resnet8",), segments=(6,))
        counts = (1,)
    chains: dict[str, Chain] = {
        name: make_resnet(name, num_classes=10, stem="cifar", dtype="bfloat16") for name in options.resnets
    }
    chains |= {f"chain of {count}": make_chain(count) for count in options.segments}
    tables = {
        "starts": [measure_starts(model, options.repeats) for model in options.models],
        "calls": [measure_call(count) for count in counts],
        "parts": [measure_parts(name, chain) for name, chain in chains.items()],
    }
    write_tables(options.out / "own_costs.csv", {name: rows for name, rows in tables.items() if rows})
    figure = Figure(figsize=(12, 4), layout="constrained")
    starts, parts = figure.subplots(1, 2)
    for draw, axes, rows in ((_draw_starts, starts, tables["starts"]), (_draw_growth, parts, tables["parts"])):
        if rows:
            draw(axes, rows)
            axes.legend()
    save_panels(options.out / "own_costs.png", figure, f"trjax's own costs, {os.cpu_count()} CPU cores")


if __name__ == "__main__":
    main(run, Options)
