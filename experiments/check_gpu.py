"""Do the predictions hold on the devices attached here: speed, memory, kernels and gaps, AllReduces, CUDA graphs?"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
from jax.profiler import ProfileData, ProfileOptions
from jax.sharding import Mesh
from matplotlib.figure import Figure
from report import Common, Row, announce, main, print_rows, require_positive, save_axes, save_rows
from steps import place_inputs

from trjax.audit.report import Report
from trjax.config.presets import preset_config
from trjax.config.run import Config, ModelConfig
from trjax.cost.kernels import LAUNCH_SECONDS
from trjax.explain.step import format_report
from trjax.mesh import machine_of, make_mesh, start_platform
from trjax.run.profile import GRAPH_CALLS, UNNAMED, Trace, divide, find_gaps, read_trace
from trjax.step.compile import lower_step
from trjax.step.expected import expect
from trjax.step.options import probe_options
from trjax.step.program import Program, make_program
from trjax.step.rules import analyze_step, group_of
from trjax.xla.compiled import Compiled, compile_lowered

WARMUP_STEPS = 5  # left out of the times: the first calls fill pools, and make the CUDA graphs
QUICK_STEPS, PROFILED_STEPS = 10, 5
TORCH_SECONDS = 90  # PyTorch may take to compile and run: the script is to end within four minutes
Figures = dict[str, float | None]  # None: not known
Found = tuple[Figures, list[float], list[list[str]]]  # figures, gaps in us, what each device reduced, in order


@dataclass(frozen=True)
class Options(Common):
    """Compare the predictions for a step with the devices here: ResNet-50 in bfloat16, at 224x224."""

    quick: bool = False
    """Run 10 steps of ResNet-18 at 32x32 with 8 images a device, which also works on CPU devices."""
    steps: int = 50
    """Timed steps."""
    images_per_device: int = 256
    """Images of a step on each device."""


def summarise(trace: Trace, num_steps: int) -> Found:
    """Returns figures of the mean step of one device, the gaps and the orders; raises ValueError without any event."""
    parts, events, calls = divide(trace, num_steps), trace.events, trace.calls
    devices = sorted({event.device for event in events})
    gaps, orders = [], []
    for device in devices:
        own = sorted((event for event in events if event.device == device), key=lambda event: event.start)
        gaps += [end - start for start, end in find_gaps(event.interval for event in own)]
        orders.append([event.group for event in own if event.group])
    turns = len(devices) * num_steps
    figures: Figures = {
        "kernels and copies": sum(not event.group for event in events) / turns,
        "busy ms": parts.computing + parts.exposed,
        "gaps ms": sum(gaps) / 1e6 / turns,
        "AllReduces": sum(map(len, orders)) / turns,
        "exposed AllReduce ms": parts.exposed,
        "CUDA graph launches": calls[GRAPH_CALLS[0]] / turns,
        "CUDA graph updates": calls[GRAPH_CALLS[1]] / turns,
        "launches in CUDA graphs": sum(event.in_graph for event in events) / turns,
    }
    return figures, [gap / 1e3 for gap in gaps], orders


def make_config(options: Options, num_devices: int) -> Config:
    """Returns the run: the preset's model, optimizer and precision, on noise."""
    require_positive(steps=options.steps, images_per_device=options.images_per_device)
    preset = preset_config("imagenet-resnet50")
    size, classes, local_batch = (32, 10, 8) if options.quick else (224, 1000, options.images_per_device)
    examples = local_batch * num_devices
    data = replace(preset.data, source="synthetic", image_shape=(size, size, 3), num_classes=classes)
    data = replace(data, train_examples=examples, test_examples=1)
    model = ModelConfig(arch="resnet18") if options.quick else preset.model
    return replace(preset, global_batch=examples, data=data, model=model)


def run_steps(step: Any, state: Any, inputs: tuple[Any, ...], num_steps: int) -> tuple[Any, float, float]:
    """Returns the state, the seconds of a step and the last loss; results are awaited one step late, as in training."""
    start, results = time.perf_counter(), None
    for _ in range(num_steps):
        previous = results
        state, results = step(state, *inputs)
        jax.block_until_ready(previous)
    loss, _, _, count, *_ = np.asarray(results)
    return state, (time.perf_counter() - start) / num_steps, float(loss / count)


def profile_steps(step: Any, state: Any, inputs: tuple[Any, ...], compiled: Compiled) -> Found:
    """Returns `summarise` of a few steps."""
    profiler = ProfileOptions()
    profiler.python_tracer_level = 0  # tracing Python would slow down the host, which launches the kernels
    groups = {operation.name: group_of(operation) for operation in compiled.operations if operation.collective}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=profiler):
            jax.block_until_ready(run_steps(step, state, inputs, PROFILED_STEPS)[0])
        (file,) = Path(folder).rglob("*.xplane.pb")
        return summarise(read_trace(ProfileData.from_file(str(file)), groups), PROFILED_STEPS)


def predict(found: Report, compiled: Compiled) -> Figures:
    """Returns what the audit expects; it counts the time from each kernel to the next as the kernel's."""
    total = found.summary
    gaps_ms = total.kernels * LAUNCH_SECONDS * 1e3
    return {
        "images/s": total.images_per_second,
        "step ms": total.step_ms,
        "peak memory GB": (compiled.argument_bytes + compiled.temp_bytes) / 1e9,
        "kernels and copies": total.kernels,
        "busy ms": total.step_ms - gaps_ms,
        "gaps ms": gaps_ms,
        "AllReduces": total.all_reduces,
        "exposed AllReduce ms": total.exposed_ms,
        "CUDA graph launches": total.graphs,
        "launches in CUDA graphs": total.graph_launches,
    }


def warm_up(program: Program, config: Config, step: Any) -> tuple[Any, tuple[Any, ...], float]:
    """Returns the state after the first steps, what else a step takes, and the loss."""
    inputs = jax.block_until_ready(place_inputs(config, program))
    state, _, loss = run_steps(step, program.init(), inputs, WARMUP_STEPS)
    return state, inputs, loss


def measure(program: Program, config: Config, compiled: Compiled, step: Any, num_steps: int) -> Found:
    """Returns the same as measured, and the gaps and orders."""
    state, inputs, first = warm_up(program, config, step)
    state, seconds, last = run_steps(step, state, inputs, num_steps)
    print(f"loss {first:.4f} after {WARMUP_STEPS} steps, {last:.4f} after {num_steps} more")
    counted = filter(None, (device.memory_stats() for device in program.mesh.devices.flat))  # not on the CPU
    peak = max((stats["peak_bytes_in_use"] / 1e9 for stats in counted), default=None)
    timed: Figures = {"images/s": config.global_batch / seconds, "step ms": seconds * 1e3, "peak memory GB": peak}
    profiled, gaps_us, orders = profile_steps(step, state, inputs, compiled)
    return timed | profiled | {"largest gap us": max(gaps_us, default=0.0)}, gaps_us, orders


def measure_plain(config: Config, mesh: Mesh, num_steps: int) -> float | None:
    """Returns a device's images/s of the step that writes down every convolution's result, for BatchNorm to read it.

    None, and prints why, where that does not fit.
    """
    with patch("trjax.models.resnet.saves_traffic", return_value=False):
        program = make_program(config, mesh)
        step = lower_step(program).compile()
    try:
        state, inputs, _ = warm_up(program, config, step)
        seconds = run_steps(step, state, inputs, num_steps)[1]
    except jax.errors.JaxRuntimeError as error:
        print(f"our step without moments: left out: {str(error).splitlines()[0]}")
        return None
    return config.global_batch / mesh.size / seconds


def measure_torch(config: Config, local_batch: int, num_steps: int) -> float | None:
    """Returns PyTorch's images/s on one device; None, and prints why, where there are none."""
    numbers = config.data.image_shape[0], config.data.num_classes, local_batch, num_steps
    command = [sys.executable, str(Path(__file__).with_name("torch_resnet.py")), config.model.arch, *map(str, numbers)]
    try:  # in a process of its own: neither meets the other's libraries
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TORCH_SECONDS).stdout.strip()
    except subprocess.TimeoutExpired:
        said = f"PyTorch: left out, not done after {TORCH_SECONDS} s"
    if re.fullmatch(r"[\d.]+", said):
        return float(said)
    print(said or "PyTorch: left out, it failed")
    return None


def make_row(what: str, predicted: float | None, measured: float | None) -> Row:
    """Returns a row; without a ratio if a number is not known or the prediction is 0."""
    ratio = measured / predicted if predicted and measured is not None else None
    return {"what": what, "predicted": predicted, "measured": measured, "ratio": ratio}


def _format_row(row: Row) -> Row:
    return {name: "-" if cell is None else cell if name == "what" else f"{cell:,.5g}" for name, cell in row.items()}


def compare(config: Config, mesh: Mesh, num_steps: int, ours: float) -> list[Row]:
    """Returns, and prints, the images/s of a device beside those of our step without moments, and of PyTorch's."""
    theirs = {
        "PyTorch": measure_torch(config, config.global_batch // mesh.size, num_steps),
        "our step without moments": measure_plain(config, mesh, num_steps),
    }
    own, rows = ours / mesh.size, []
    for name, rate in theirs.items():
        if rate is not None:
            print(f"{name}: {rate:,.0f} images/s a device, ours {own:,.0f}, {own / rate:.3f} of that")
            rows.append(make_row(f"images/s a device, beside {name}", rate, own))
    return rows


def draw(path: Path, title: str, gaps_us: Sequence[float]) -> None:
    """Draws how long the gaps between kernels are."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.hist(gaps_us, np.geomspace(0.1, max([1.0, *gaps_us]), 60).tolist())
    axes.axvline(LAUNCH_SECONDS * 1e6, color="black", linestyle=":")
    axes.set(xscale="log", yscale="log", ylabel=f"gaps in {PROFILED_STEPS} steps")
    axes.set_xlabel("gap between kernels (us), dotted: predicted for each")
    save_axes(path, figure, axes, title)


def check(options: Options) -> None:
    """Runs the experiment, prints the table and writes the files."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory of the same device
    start_platform("auto", "0-1")
    mesh = make_mesh()
    device, config = mesh.devices.flat[0], make_config(options, mesh.size)
    if device.platform == "cpu" and not options.quick:
        raise ValueError("no GPU here, and a full run takes hours on the CPU: pass --quick")
    num_steps, local_batch = QUICK_STEPS if options.quick else options.steps, config.global_batch // mesh.size
    machine, dropped = machine_of(mesh, config.link_gbytes), probe_options(mesh).dropped
    title = f"{config.model.arch}, {mesh.size} x {device.device_kind}, {local_batch} images each"
    announce(f"{title}, predicted for {machine.target.name}", options.out)
    program, start = make_program(config, mesh), time.perf_counter()
    compiled = compile_lowered(lower_step(program))  # once: what is audited is what runs
    step = compiled.executable
    print(f"compiled in {time.perf_counter() - start:.0f} s, options dropped: {', '.join(dropped) or 'none'}")
    found = analyze_step(
        compiled, machine, config.global_batch, expect(config, program.plan, machine.topology), dropped
    )
    measured, gaps_us, orders = measure(program, config, compiled, step, num_steps)
    planned, predicted = [collective.group for collective in found.collectives], predict(found, compiled)
    kept = all(order in (planned * PROFILED_STEPS, [UNNAMED] * len(planned) * PROFILED_STEPS) for order in orders)
    rows = [make_row(what, predicted.get(what), value) for what, value in measured.items()]
    print(f"{format_report(found)}\n")
    print_rows([_format_row(row) for row in rows])
    reduced = ", ".join(orders[0][: len(planned)]) or "none"
    print(f"\nAllReduces of a step: {reduced}; on all devices and steps {'as' if kept else 'NOT as'} planned")
    print(f"CUDA graphs: {'in use' if measured['CUDA graph launches'] else 'not seen'}", flush=True)
    draw(options.out / "check_gpu.png", title, gaps_us)
    rows += compare(config, mesh, num_steps, measured["images/s"] or 0.0)
    save_rows(options.out / "check_gpu.csv", rows)


if __name__ == "__main__":
    main(check, Options)
