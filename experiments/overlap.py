"""How much of the communication hides behind the backward, and what is left of a step without it?

Compute only, communication only, both, with several ways to sum the gradients: `single`, one AllReduce behind the
whole backward, is the step without overlap. The parts are those of the DDP paper: forward, backward (compute), backward
(communication that is waited for), optimizer. Measured on CPU devices, where an AllReduce blocks and nothing can
hide; and replayed from what compiles for H100s.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from machines import compile_for, h100s, quick_config, replay_on, without_augmentation
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from report import announce, hardware, main, progress, write_rows

from trjax.audit.figures import phase_of
from trjax.audit.report import Report
from trjax.config.presets import preset_config
from trjax.config.run import Config, Reducing
from trjax.data.augment import make_augment
from trjax.data.batches import Batch, train_batches
from trjax.data.mixing import Inputs
from trjax.data.sources import describe, load
from trjax.keys import example_keys
from trjax.mesh import REPLICATED, SPLIT, make_mesh, placement, start_platform
from trjax.models.chain import Chain, apply_segment
from trjax.models.resnet import Block, Head, StemSegment
from trjax.step.backward import packed_backward
from trjax.step.compile import lower_step
from trjax.step.options import probe_options
from trjax.step.plan import Plan
from trjax.step.planner import plan_run
from trjax.step.program import Program, make_program, shape_run
from trjax.step.scores import score
from trjax.step.spec import StepInputs, TrainStep
from trjax.step.update import make_train_step
from trjax.xla.compiled import Compiled

REDUCERS: tuple[Reducing, ...] = ("single", "per_leaf", "two_group")
QUICK_REDUCERS: tuple[Reducing, ...] = ("single", "two_group")
MACHINES = {"1x8 NVLink": ("1x8", 0.0), "4x8 50 GB/s": ("4x8", 50.0), "4x8 100 Gb/s a host": ("4x8", 12.5 / 8)}
"""Topologies, and the GB/s that each GPU reaches to other hosts; the last has the network of the DDP paper."""
PARTS = {"forward": "#9ecae1", "backward": "#3182bd", "exposed": "#d62728", "optimizer": "#bdbdbd"}
COMMUNICATION = "#fdae6b"
DEVICES = 2  # as many as there are cores on small machines: with more, their compute is not at the same time
Call = Callable[[], Any]


@dataclass(frozen=True)
class Options:
    """Split a step into compute, communication and what overlaps, measured here and predicted for H100s."""

    quick: bool = False
    """One block without augmentation in place of ResNet-8 (measured) and ResNet-50 (predicted); no `per_leaf`."""
    repeats: int = 30
    """Steps of each kind that are timed."""
    out: Path = Path("results")
    """Folder for the CSV and the figure."""


def small_chain() -> Chain:
    """Returns a chain with every kind of region that compiles fast."""
    return {
        "stem": StemSegment(32, "cifar"),
        "block": Block(256, 2, bottleneck=False, projection=True),
        "head": Head(10),
    }


def keep(buffer: jax.Array, after: jax.Array | None) -> jax.Array:
    """Sums nothing: the launch of a step that only computes, in the same order."""
    return buffer if after is None else jax.lax.optimization_barrier((after, buffer))[1]


def make_compute_step(program: Program) -> TrainStep:
    """Returns the program's train step without its sums; every device keeps gradients of its own."""
    spec = replace(program.spec, gradients=replace(program.gradients, launch=keep), written_out=True)
    return make_train_step(spec, program.mesh, program.layouts)


def make_parts(config: Config, program: Program) -> tuple[Any, Any]:
    """Returns the forward alone and forward with backward, jitted: `(params, batch_stats, batch)`, nothing summed."""
    augment = make_augment(config.data, describe(config.data), config.seed)

    def prepare(block: Batch) -> Inputs:
        return augment(block, jnp.int32(0))

    def forward(params: Any, batch_stats: Any, block: Batch) -> Any:
        x, keys, stats = prepare(block).images, example_keys(jax.random.key(0), block.indices), {}
        for name, module in program.gradients.chain.items():
            x, stats[name] = apply_segment(
                module, params[name], batch_stats[name], x, train=True, mask=block.mask, keys=keys
            )
        return score(x, block.labels, block.mask)[1], stats

    def backward(params: Any, batch_stats: Any, block: Batch) -> Any:
        inputs = StepInputs(params, batch_stats, jax.random.key(0))
        return [buffer for _, buffer in packed_backward(program.gradients, inputs, block, prepare)]

    specs = (REPLICATED, REPLICATED, SPLIT)
    over = partial(jax.shard_map, mesh=program.mesh, in_specs=specs, out_specs=SPLIT, check_vma=False)
    options = probe_options(program.mesh).accepted
    return jax.jit(over(forward), compiler_options=options), jax.jit(over(backward), compiler_options=options)


def make_sums(program: Program) -> Any:
    """Returns the sums of a step alone, jitted: from the groups' buffers to their sums."""

    def sums(buffers: list[jax.Array]) -> list[jax.Array]:
        previous, found = None, []
        for buffer in buffers:
            previous = program.gradients.launch(buffer, previous)
            found.append(previous)
        return found

    step = jax.shard_map(sums, mesh=program.mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False)
    return jax.jit(step, compiler_options=probe_options(program.mesh).accepted)


def repeat_step(step: Any, program: Program, initial: Any, batch: Batch) -> Call:
    """Returns a call that does one more step, and waits for it."""
    state = jax.device_put(initial, program.layouts.formats)
    rates, votes = np.full(program.num_steps, 1e-3, np.float32), program.votes(False)

    def call() -> Any:
        nonlocal state
        state, results = step(state, batch, rates, votes)
        return state, results

    return call


def time_calls(calls: dict[str, Call], repeats: int) -> dict[str, float]:
    """Returns the median milliseconds of each call; they take turns, so that the machine's noise hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(taken[2:])) * 1e3 for name, taken in seconds.items()}  # the first ones compile


def row_of(where: str, program: str, parts: dict[str, float], communication: float) -> dict[str, Any]:
    """Returns a row from the milliseconds of the parts of `both`."""
    found = {f"{name} ms": parts[name] for name in PARTS}
    found["compute only ms"] = sum(parts.values()) - parts["exposed"]
    found |= {"communication only ms": communication, "both ms": sum(parts.values())}
    return {"where": where, "program": program} | {name: round(number, 3) for name, number in found.items()}


def measure(config: Config, chain: Chain | None, reducers: Sequence[Reducing], repeats: int) -> list[dict[str, Any]]:
    """Returns a row for each way to sum, measured on the devices here."""
    mesh = make_mesh(f"0-{DEVICES - 1}")
    programs = {name: make_program(replace(config, reducer=name), mesh, chain) for name in reducers}
    program = programs["two_group"]
    initial = jax.device_get(program.init())
    (batch,) = train_batches(load(config.data)[0], config.global_batch, config.seed, 0, 1)
    placed = program.place_train(batch)
    whole = jax.device_put((initial.params, initial.batch_stats), placement(mesh, REPLICATED))
    forward, backward = make_parts(config, program)
    calls: dict[str, Call] = {
        "forward": lambda: forward(*whole, placed),
        "backward": lambda: backward(*whole, placed),
        "compute": repeat_step(make_compute_step(program), program, initial, placed),
    }
    for name, own in programs.items():
        buffers = [np.zeros(mesh.size * group.size_elements, group.dtype) for group in own.plan.groups]
        buffers = jax.device_put(buffers, placement(mesh, SPLIT))
        calls[f"{name} sums"] = partial(make_sums(own), buffers)
        calls[f"{name} step"] = repeat_step(lower_step(own).compile(), own, initial, placed)
    progress(f"{DEVICES} devices here: compiling and timing {len(calls)} programs ...")
    taken = time_calls(calls, repeats)
    alone = {"forward": taken["forward"], "backward": taken["backward"] - taken["forward"]}
    alone["optimizer"] = taken["compute"] - taken["backward"]
    return [
        row_of(
            "measured here", name, alone | {"exposed": taken[f"{name} step"] - taken["compute"]}, taken[f"{name} sums"]
        )
        for name in reducers
    ]


def split_replay(found: Report) -> dict[str, float]:
    """Returns the milliseconds of the parts of a replayed step; a kernel is told by where it comes from."""
    phases: Counter[str] = Counter()
    for span in found.timeline.kernels:
        phases[phase_of(span)] += span.seconds * 1e3  # type: ignore[assignment]
    rest = found.summary.compute_ms - phases["forward"] - phases["backward"]
    return {"forward": phases["forward"], "backward": phases["backward"],
            "exposed": found.summary.exposed_ms, "optimizer": rest}  # fmt: skip


def predict(config: Config, chain: Chain | None, reducers: Sequence[Reducing]) -> list[dict[str, Any]]:
    """Returns a row for each machine and way to sum, replayed from what compiles: once where the groups are the same.

    Args:
        config: the run, with one device's batch.
        chain: in place of the configured model.
        reducers: besides `auto`.
    """
    rows, shapes = [], shape_run(config, chain)
    compiled: dict[tuple[Plan, bool], Compiled] = {}
    for where, (topology, link_gbytes) in MACHINES.items():
        machine = h100s(topology, link_gbytes)
        batch = config.global_batch * machine.topology.world_size
        for reducer in (*reducers, "auto"):
            own = replace(config, reducer=reducer, link_gbytes=link_gbytes, global_batch=batch)
            plan = plan_run(own, shapes, machine, "OHWI")
            key = plan, reducer == "per_leaf"  # which the compiler gets with its own options
            if key not in compiled:
                progress(f"{where}, {reducer}: compiling for H100s ...")
                compiled[key], _ = compile_for(machine, own, chain)
            found = replay_on(machine, compiled[key], own, plan)
            rows.append(row_of(where, reducer, split_replay(found), found.summary.comm_ms))
    return rows


def _draw_place(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for place, row in enumerate(rows):
        bottom = 0.0
        for part, color in PARTS.items():
            axes.bar(place - 0.12, max(0.0, row[f"{part} ms"]), 0.5, bottom, color=color)
            bottom += max(0.0, row[f"{part} ms"])
        axes.bar(place + 0.28, row["communication only ms"], 0.2, color=COMMUNICATION)
        axes.text(place - 0.12, bottom, f"{row['both ms']:.1f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(rows)), [row["program"] for row in rows], rotation=25)
    axes.set_title(rows[0]["where"], fontsize="medium")
    axes.margins(y=0.12)


def draw(path: Path, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Draws the parts of every step, with its communication alone beside it, a panel for each place."""
    places = list(dict.fromkeys(row["where"] for row in rows))
    figure = Figure(figsize=(13, 5), layout="constrained")
    for axes, where in zip(figure.subplots(1, len(places)), places, strict=True):
        _draw_place(axes, [row for row in rows if row["where"] == where])
        axes.set_ylabel("time of a step (ms)")
    names = {"exposed": "communication that is waited for", "optimizer": "optimizer and the rest"}
    legend = [Patch(color=color, label=names.get(part, part)) for part, color in PARTS.items()]
    legend.append(Patch(color=COMMUNICATION, label="communication only"))
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend))
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def compare(options: Options) -> None:
    """Runs the experiment, prints the table and writes the files."""
    if options.repeats < 1:
        raise ValueError(f"repeats={options.repeats}: must be positive")
    start_platform("cpu", f"0-{DEVICES - 1}")
    announce(f"measured on {hardware()}; predicted for H100s from what is compiled for them", options.out)
    here = replace(preset_config("digits"), global_batch=48 * DEVICES)
    if options.quick:
        here, there, chain = without_augmentation(here), quick_config(), small_chain()
        rows = measure(here, chain, QUICK_REDUCERS, min(options.repeats, 5)) + predict(there, chain, QUICK_REDUCERS)
    else:
        there = replace(preset_config("imagenet-resnet50"), global_batch=256)
        rows = measure(here, None, REDUCERS, options.repeats) + predict(there, None, REDUCERS)
    without = {row["where"]: row["both ms"] for row in rows if row["program"] == "single"}
    rows = [row | {"saved %": round(100 * (1 - row["both ms"] / without[row["where"]]), 1)} for row in rows]
    write_rows(options.out / "overlap.csv", rows)
    there_name = "one block" if options.quick else there.model.arch
    draw(options.out / "overlap.png", f"measured: {hardware()}; predicted: {there_name} on H100s", rows)


if __name__ == "__main__":
    main(compare, Options)
