"""What do ordinary ways of writing the train step compile to, and what does ours? On GPUs that need not be here.

Same model, state, batch and optimizer, one program beside the other; times are predicted from what was compiled.
With BatchNorm over each device's batch (`local`):
    pmean      `shard_map`, one `jax.grad` of the whole loss, a `pmean` for every gradient and statistic
    two_group  trjax: two AllReduces, launched from within the backward
    auto       trjax: as many as the link needs
With BatchNorm over the global batch (`sync`):
    automatic  `jit` with a split batch: the compiler inserts the collectives
    two_group, auto
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from machines import compile_checked, h100s, mesh_of, reference_config
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from report import Common, Row, announce, main, progress, save_panels, write_rows

from trjax.audit.report import Report
from trjax.config.run import Config
from trjax.cost.machines import Machine
from trjax.data.augment import make_augment
from trjax.data.batches import Batch
from trjax.data.sources import describe
from trjax.keys import stream_key
from trjax.mesh import AXIS, REPLICATED, SPLIT, placement, start_platform
from trjax.models.chain import Chain, apply_chain, segment_keys
from trjax.step.collectives import vary
from trjax.step.expected import expect
from trjax.step.optim import make_optimizer
from trjax.step.options import probe_options
from trjax.step.program import Program, make_chain, make_program, shape_run
from trjax.step.rules import STATISTICS, analyze_step, group_of
from trjax.step.scores import score
from trjax.step.state import TrainState
from trjax.xla.operations import Operation

MACHINES = {"1x8 NVLink": ("1x8", 0.0), "4x8 50 GB/s": ("4x8", 50.0), "32x8 25 GB/s": ("32x8", 25.0)}
"""Topologies, and the GB/s that each GPU reaches to other hosts."""
PROGRAMS: dict[Literal["local", "sync"], tuple[str, ...]] = {
    "local": ("pmean", "two_group", "auto"),
    "sync": ("automatic", "two_group", "auto"),
}
"""Programs by BatchNorm mode: only those of one mode compute the same."""
GRADIENTS, MOMENTS, COMPUTE = "#d62728", "#fdae6b", "#c6c9cc"


@dataclass(frozen=True)
class Options(Common):
    """Compile ResNet-50's train step, written in several ways, for eight H100s and more; compare the programs."""

    quick: bool = False
    """Compile a wide ResNet-8 on CIFAR-10 without augmentation, on one host and without `auto`."""


def make_ordinary_step(config: Config, chain: Chain, mesh: Mesh, name: Literal["pmean", "automatic"]) -> Any:
    """Returns the update as most trainers write it, with the arguments and results of `update.make_train_step`."""
    optimizer = make_optimizer(config.optim, shape_run(config, chain).params)
    spec = describe(config.data)
    augment, steps_per_epoch = make_augment(config.data, spec, config.seed), spec.train_examples // config.global_batch

    def mean_loss(params: Any, batch_stats: Any, block: Batch, images: jax.Array, key: jax.Array) -> Any:
        keys = segment_keys(chain, key, block.indices)
        x, next_stats = apply_chain(
            chain, params, images, batch_stats=batch_stats, train=True, mask=block.mask, keys=keys
        )
        loss, results = score(x, block.labels, block.mask)
        return loss / len(block.labels), (next_stats, results)

    def differentiate(params: Any, state: TrainState, block: Batch) -> Any:
        key = jax.random.fold_in(stream_key(config.seed, "dropout"), state.step)
        images = augment(block, state.step // steps_per_epoch).images
        return jax.grad(mean_loss, has_aux=True)(params, state.batch_stats, block, images, key)

    def update(state: TrainState, gradients: Any, batch_stats: Any, learning_rates: jax.Array) -> TrainState:
        learning_rate = learning_rates[state.step]
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, jax.tree.map(lambda leaf: -learning_rate * leaf, updates))
        return TrainState(params, batch_stats, opt_state, state.step + 1, state.skipped, state.ema, state.loss_scale)

    def with_pmean(state: TrainState, block: Batch, rates: jax.Array, _votes: jax.Array) -> Any:
        varying = replace(state, batch_stats=vary(state.batch_stats))
        gradients, (batch_stats, results) = differentiate(vary(state.params), varying, block)
        # float32, one AllReduce a leaf, as far as the compiler does not combine them: 102 MB for ResNet-50
        gradients, batch_stats = jax.lax.pmean((gradients, batch_stats), AXIS)
        return update(state, gradients, batch_stats, rates), jax.lax.psum(results, AXIS)

    def automatic(state: TrainState, batch: Batch, rates: jax.Array, _votes: jax.Array) -> Any:
        gradients, (batch_stats, results) = differentiate(state.params, state, batch)
        return update(state, gradients, batch_stats, rates), results

    step: Any = automatic
    if name == "pmean":
        specs = (REPLICATED, SPLIT, REPLICATED, SPLIT)
        step = jax.shard_map(with_pmean, mesh=mesh, in_specs=specs, out_specs=REPLICATED)
    whole, split = placement(mesh, REPLICATED), placement(mesh, SPLIT)
    return jax.jit(step, in_shardings=(whole, split, whole, split), out_shardings=whole, donate_argnums=0)


def use_ordinary_step(config: Config, program: Program, name: Literal["pmean", "automatic"]) -> Program:
    """Returns a run's program with that update in place of ours, and no reduction of ours in the model."""
    chain = make_chain(replace(config, bn="local"), describe(config.data))
    return replace(program, steps={(0, 1): make_ordinary_step(config, chain, program.mesh, name)})


def inspect(config: Config, name: str, mesh: Mesh, machine: Machine) -> Report:
    """Compiles one program and returns what was found in it.

    Raises:
        ValueError: it does not compile.
    """
    ordinary = name in ("pmean", "automatic")
    program = make_program(config if ordinary else replace(config, reducer=name), mesh)  # type: ignore[arg-type]
    if ordinary:
        program = use_ordinary_step(config, program, name)  # type: ignore[arg-type]
    compiled = compile_checked(program, name)
    if ordinary:
        return analyze_step(compiled, machine, config.global_batch)
    expected = expect(config, program.plan, machine.topology)
    return analyze_step(compiled, machine, config.global_batch, expected, probe_options(mesh).dropped)


def _groups_behind(operation: Operation, by_name: dict[str, Operation]) -> set[str]:
    """Returns the groups of what feeds an operation: an AllReduce that the compiler combined names no source."""
    if operation.source:
        return {group_of(operation)}
    before = [by_name[name] for name in operation.depends_on if name in by_name]
    return set().union(*(_groups_behind(other, by_name) for other in before))


def tabulate(found: Report, synchronised: bool) -> dict[str, float]:
    """Returns the columns of one program; a collective with a gradient in it counts as the gradients'."""
    total, timeline = found.summary, found.timeline
    spans = [*timeline.kernels, *(communication.span for communication in timeline.communications)]
    by_name = {span.operation.name: span.operation for span in spans}
    gradients_ms = sum(
        communication.exposed * 1e3
        for communication in timeline.communications
        if not synchronised or _groups_behind(communication.span.operation, by_name) != {STATISTICS}
    )
    return {
        "AllReduces": total.all_reduces,
        "blocking": total.blocking,
        "reduced MB": round(sum(row.bytes for row in found.collectives) / 1e6, 2),
        "communication ms": round(total.comm_ms, 2),
        "exposed ms": round(total.exposed_ms, 3),
        "gradients exposed ms": round(gradients_ms, 3),
        "bound ms": round(total.exposed_bound_ms, 3),
        "compute ms": round(total.compute_ms, 2),
        "step ms": round(total.step_ms, 2),
        "images/s": round(total.images_per_second),
        "HBM GB": round(total.hbm_bytes / 1e9, 2),
        "temp GB": round(total.temp_bytes / 1e9, 2),
        "kernels": total.kernels,
        "transposes": total.transposes,
        "gather copies MB": round(total.gather_copy_bytes / 1e6, 2),
    }


def _draw_machine(exposed: Axes, step: Axes, rows: Sequence[Row]) -> None:
    places = [index + (row["bn"] == "sync") for index, row in enumerate(rows)]  # a gap between the modes
    gradients = np.array([row["gradients exposed ms"] for row in rows])
    all_exposed = np.array([row["exposed ms"] for row in rows])
    compute = np.array([row["compute ms"] for row in rows])
    exposed.bar(places, gradients, color=GRADIENTS)
    bars = exposed.bar(places, all_exposed - gradients, bottom=gradients, color=MOMENTS)
    exposed.bar_label(bars, [f"{number:.2f}" for number in all_exposed], padding=3)
    step.bar(places, compute, color=COMPUTE)
    step.bar(places, gradients, bottom=compute, color=GRADIENTS)
    bars = step.bar(places, all_exposed - gradients, bottom=compute + gradients, color=MOMENTS)
    step.bar_label(bars, [f"{row['step ms']:.1f}" for row in rows], padding=3)
    step.set_xticks(places, [row["program"] for row in rows], rotation=30, ha="right", rotation_mode="anchor")
    for axes in (exposed, step):
        axes.margins(y=0.1)
        axes.spines[["top", "right"]].set_visible(False)
        for mode in PROGRAMS:
            centre = float(np.mean([place for place, row in zip(places, rows, strict=True) if row["bn"] == mode]))
            axes.text(centre, 1.02, f"bn={mode}", transform=axes.get_xaxis_transform(), ha="center", color="dimgray")


def draw(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draws exposed time and step time of every program, a column for each machine."""
    machines = list(dict.fromkeys(row["machine"] for row in rows))
    figure = Figure(figsize=(max(6.5, 4.2 * len(machines)), 7), layout="constrained")
    axes = figure.subplots(2, len(machines), sharex="col", sharey="row", squeeze=False)
    for column, machine in enumerate(machines):
        _draw_machine(axes[0, column], axes[1, column], [row for row in rows if row["machine"] == machine])
        axes[0, column].set_title(machine, pad=24)
    axes[0, 0].set_ylabel("exposed communication (ms)")
    axes[1, 0].set_ylabel("step time (ms)")
    colors = {"kernels": COMPUTE, "exposed: gradients": GRADIENTS, "exposed: BatchNorm's moments": MOMENTS}
    save_panels(path, figure, title, {label: Patch(color=color) for label, color in colors.items()})


def compare(options: Options) -> None:
    """Runs the experiment, prints the table and writes the files."""
    start_platform("cpu", "all")
    config = reference_config(options.quick)
    machines = list(MACHINES.items())[: 1 if options.quick else None]
    announce("compiled for H100s that are not here", options.out)
    rows: list[Row] = []
    for (where, (topology, link_gbytes)), bn in product(machines, PROGRAMS):
        machine = h100s(topology, link_gbytes)
        mesh = mesh_of(machine)
        own = replace(config, global_batch=config.global_batch * mesh.size, link_gbytes=link_gbytes, bn=bn)
        for name in PROGRAMS[bn][: 2 if options.quick else None]:
            progress(f"{where}, bn={bn}, {name}: compiling ...")
            found = inspect(own, name, mesh, machine)
            for verdict in found.verdicts:
                if not verdict.ok:
                    progress(f"  not as planned: {verdict.text}")
            rows.append({"machine": where, "bn": bn, "program": name} | tabulate(found, bn == "sync"))
    write_rows(options.out / "compare_programs.csv", rows)
    what = f"{config.model.arch} on H100s, {config.global_batch} images each"
    draw(options.out / "compare_programs.png", f"{what}: predicted from what compiles", rows)


if __name__ == "__main__":
    main(compare, Options)
