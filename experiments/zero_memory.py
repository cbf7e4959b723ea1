"""What memory does a device save when it keeps the optimizer state of its own shard only?

The same step with replicated state (`two_group`) and with ZeRO's first stage (`zero1`), for optimizers with one and
with two numbers for each parameter, over world size and model: what the compiler sets aside on each device.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from machines import compiling, h100s, mesh_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report import Common, Row, announce, hardware, main, progress, save_panels, write_rows

from trjax.config.presets import preset_config
from trjax.config.run import Config, ModelConfig, OptimConfig, Reducing
from trjax.mesh import make_mesh, start_platform
from trjax.step.compile import lower_step
from trjax.step.program import make_program

MODELS: dict[str, tuple[int, ...]] = {"resnet20": (1, 2, 4, 8, 16, 64), "resnet50": (1, 8, 64), "resnet152": (8,)}
"""Models, and the world sizes that they are compiled for: hosts of eight GPUs."""
QUICK_MODELS: dict[str, tuple[int, ...]] = {"resnet8": (1, 4)}
SGD_SIZES = (4, 8)  # of these, for sgd: in all else it is as adamw, with half of its state
OPTIMIZERS = {"sgd": OptimConfig(), "adamw": OptimConfig(kind="adamw", learning_rate=1e-3)}
REDUCERS: tuple[Reducing, Reducing] = ("two_group", "zero1")
LOCAL_BATCH = 32
PARTS = {"parameters MB": "#9ecae1", "optimizer MB": "#d62728", "batch MB": "#bdbdbd", "temporary MB": "#fdae6b"}
FAST_COMPILE = {"xla_backend_optimization_level": 0}  # of machine code only: the memory is the same


@dataclass(frozen=True)
class Options(Common):
    """Compile steps with replicated and with sharded optimizer state; compare the memory of a device."""

    quick: bool = False
    """Compile a ResNet-8 for CPU devices."""


def device_bytes(tree: Any, placed: Any) -> int:
    """Returns what one device holds of a tree of shapes, from where each leaf lies."""
    total = 0
    for leaf, where in zip(jax.tree.leaves(tree), jax.tree.leaves(placed), strict=True):
        shape = getattr(where, "sharding", where).shard_shape(leaf.shape)
        total += math.prod(shape) * np.dtype(leaf.dtype).itemsize
    return total


def measure(config: Config, mesh: Mesh) -> dict[str, float]:
    """Returns the megabytes of one device: from shapes and placements, and what the compiler sets aside.

    Raises:
        ValueError: the step does not compile.
    """
    program = make_program(config, mesh)
    with compiling(config.reducer):
        memory = lower_step(program).compile(FAST_COMPILE).memory_analysis()
    state, formats = program.layouts.shape, program.layouts.formats
    optimizer = device_bytes(state.opt_state, formats.opt_state)
    parameters = device_bytes(state, formats) - optimizer
    found = {
        "parameters MB": parameters,
        "optimizer MB": optimizer,
        "batch MB": memory.argument_size_in_bytes - parameters - optimizer,
        "temporary MB": memory.temp_size_in_bytes,
        "arguments MB": memory.argument_size_in_bytes,
        "total MB": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
    }
    return {name: round(size_bytes / 1e6, 3) for name, size_bytes in found.items()}


def _mesh(world_size: int, here: bool) -> Mesh:
    if here:
        return make_mesh(f"0-{world_size - 1}")
    return mesh_of(h100s(f"{max(1, world_size // 8)}x{min(world_size, 8)}"))


def sweep_programs(models: dict[str, tuple[int, ...]], here: bool) -> Iterator[Row]:
    """Yields a row for each model, optimizer, world size and reducer."""
    for arch, world_sizes in models.items():
        preset = "cifar10-resnet20" if arch in ("resnet8", "resnet20") else "imagenet-resnet50"
        base = replace(preset_config(preset), model=ModelConfig(arch=arch))  # type: ignore[arg-type]
        for (name, optim), world_size, reducer in product(OPTIMIZERS.items(), world_sizes, REDUCERS):
            if name == "adamw" or world_size in SGD_SIZES:
                progress(f"{arch}, {name}, N = {world_size}, {reducer}: compiling ...")
                config = replace(base, reducer=reducer, optim=optim, global_batch=LOCAL_BATCH * world_size)
                row = {"model": arch, "optimizer": name, "N": world_size, "reducer": reducer}
                yield row | measure(config, _mesh(world_size, here))


def _draw_model(state: Axes, total: Axes, rows: Sequence[Row]) -> None:
    sizes = sorted({row["N"] for row in rows})
    for name, color in zip(OPTIMIZERS, ("#1f77b4", "#2ca02c"), strict=True):
        for reducer, style in zip(REDUCERS, ("s--", "o-"), strict=True):
            own = [row for row in rows if (row["optimizer"], row["reducer"]) == (name, reducer)]
            points = [row["N"] for row in own], [row["optimizer MB"] for row in own]
            state.loglog(*points, style, color=color, label=f"{name}, {reducer}")
    state.set_xticks(sizes, [str(size) for size in sizes])
    state.minorticks_off()
    state.set_xlim(0.8, 80)
    adamw = [row for row in rows if row["optimizer"] == "adamw"]
    places = np.array([sizes.index(row["N"]) + 0.42 * REDUCERS.index(row["reducer"]) for row in adamw])
    bottom = np.zeros(len(adamw))
    for part, color in PARTS.items():
        height = np.array([row[part] for row in adamw])
        total.bar(places, height, 0.38, bottom, color=color, label=part.removesuffix(" MB"))
        bottom += height
    for place, row in zip(places, adamw, strict=True):
        total.text(
            place, row["total MB"], f" {row['total MB']:,.0f}", rotation=90, ha="center", va="bottom", fontsize=7
        )
    total.set_xticks(np.arange(len(sizes)) + 0.21, [str(size) for size in sizes])
    total.margins(y=0.2)


def draw(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draws the optimizer state of a device over world size, and all of its memory, a column for each model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(max(6, 4.5 * len(models)), 8), layout="constrained")
    axes = figure.subplots(2, len(models), squeeze=False)
    for column, model in enumerate(models):
        _draw_model(axes[0, column], axes[1, column], [row for row in rows if row["model"] == model])
        axes[0, column].set_title(model)
        axes[1, column].set_xlabel("world size N; left two_group, right zero1 (adamw)")
    axes[0, 0].set_ylabel("optimizer state of a device (MB)")
    axes[1, 0].set_ylabel("memory of a device (MB)")
    axes[0, 0].legend(fontsize=8, loc="lower left")
    bars, labels = axes[1, 0].get_legend_handles_labels()
    save_panels(path, figure, title, dict(zip(labels, bars, strict=True)))


def sweep(options: Options) -> None:
    """Runs the experiment, prints the table and writes the files."""
    start_platform("cpu", "0-7" if options.quick else "all")
    where = hardware() if options.quick else "compiled for H100s"
    announce(where, options.out)
    rows = list(sweep_programs(QUICK_MODELS if options.quick else MODELS, options.quick))
    write_rows(options.out / "zero_memory.csv", rows)
    draw(options.out / "zero_memory.png", f"{LOCAL_BATCH} images on each device, {where}", rows)


if __name__ == "__main__":
    main(sweep, Options)
