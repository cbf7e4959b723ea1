"""What do trjax's own parts take as models grow: plan, tracing, reading the compiled program, checkpoints?

ResNets, and chains of many small segments, each a convolution with its BatchNorm; bfloat16, compiled for two H100s.
What the compiler takes is beside it. What is ours should grow as the number of tensors does, or as their bytes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from report import announce, main, progress, save_axes, write_rows

from trjax.config.run import Config, DataConfig
from trjax.cost.machines import parse_topology
from trjax.cost.targets import find_target
from trjax.mesh import machine_of, make_mesh, start_platform
from trjax.models.chain import Chain
from trjax.models.resnet import ConvNorm, Head, StemSegment, make_resnet
from trjax.run.checkpoints import About, decode, encode
from trjax.step.compile import lower_step
from trjax.step.expected import expect
from trjax.step.layouts import conv_order_of
from trjax.step.planner import plan_run
from trjax.step.program import Program, make_program, shape_run
from trjax.step.rules import analyze_step
from trjax.xla.compiled import compile_lowered
from trjax.xla.hlo import parse_module
from trjax.xla.operations import list_operations
from trjax.xla.topology import compile_config, make_topology_mesh

Value = TypeVar("Value")
CONFIG = Config(
    global_batch=32, epochs=1, precision="bfloat16",
    data=DataConfig(source="synthetic", image_shape=(32, 32, 3), train_examples=64, test_examples=32),
)  # fmt: skip
GROWING = {"plan": "plan ms", "tracing": "trace s", "reading the program": "read s"}
"""What should grow as the tensors do; checkpoints go by bytes too."""


@dataclass(frozen=True)
class Options:
    """Time plan, tracing, reading and checkpoints of models of many sizes."""

    resnets: tuple[str, ...] = ("resnet18", "resnet50", "resnet152")
    """Which of them."""
    segments: tuple[int, ...] = (30, 100, 300)
    """Of the chains."""
    quick: bool = False
    """A small ResNet and a short chain alone."""
    out: Path = Path("results")
    """Folder for the CSV and the figure."""


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
    """Returns what a function does, and the seconds that it takes."""
    began = time.perf_counter()
    done = do()
    return done, time.perf_counter() - began


def save_and_load(program: Program) -> float:
    """Returns the seconds that a checkpoint's bytes take to be made and read."""
    state: Any = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), program.layouts.saved_shape)
    data, there = timed(lambda: encode(state, About(0, {}, {}, None)))
    _, back = timed(lambda: decode(data, program.layouts.saved_shape, "the checkpoint"))
    return there + back


def measure(name: str, chain: Chain) -> dict[str, Any]:
    """Returns a row."""
    mesh = make_topology_mesh(compile_config(find_target("h100")), 1, 2)
    machine = machine_of(mesh)
    shapes, shape_seconds = timed(lambda: shape_run(CONFIG, chain))
    plan, plan_seconds = timed(lambda: plan_run(CONFIG, shapes, machine, conv_order_of("gpu")))
    program = make_program(CONFIG, mesh, chain)
    lowered, trace_seconds = timed(lambda: lower_step(program))
    compiled, compile_seconds = timed(lambda: compile_lowered(lowered))
    _, parse_seconds = timed(lambda: list_operations(parse_module(compiled.text)))  # which that did too
    expected = expect(CONFIG, plan, parse_topology("1x2"))
    found, read_seconds = timed(lambda: analyze_step(compiled, machine, CONFIG.global_batch, expected))
    saved_seconds = save_and_load(make_program(CONFIG, make_mesh("0"), chain))
    return {
        "model": name, "segments": len(chain), "tensors": len(plan.regions),
        "parameters M": round(sum(leaf.size for leaf in jax.tree.leaves(shapes.params)) / 1e6, 2),
        "kernels": found.summary.kernels, "shapes s": round(shape_seconds, 2), "plan ms": round(1e3 * plan_seconds, 1),
        "trace s": round(trace_seconds, 2), "compile s": round(compile_seconds - parse_seconds, 1),
        "read s": round(parse_seconds + read_seconds, 2),
        "checkpoint ms": round(1e3 * saved_seconds, 1),
    }  # fmt: skip


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draws what grows, by the number of tensors, each as a multiple of the smallest model's; linear is dashed."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    rows = sorted(rows, key=lambda row: row["tensors"])
    tensors = [row["tensors"] for row in rows]
    for label, column in GROWING.items():
        axes.plot(tensors, [row[column] / max(rows[0][column], 1e-9) for row in rows], marker="o", label=label)
    axes.plot(tensors, [count / tensors[0] for count in tensors], "--", color="black", label="linear in tensors")
    axes.set(xscale="log", yscale="log", xlabel="tensors in the plan", ylabel=f"times that of {rows[0]['model']}")
    axes.legend()
    save_axes(path, figure, axes, "What trjax's own parts take, as models grow")


def run(options: Options) -> None:
    """Runs the experiment, prints the table and writes the files."""
    if min(options.segments, default=3) < 3:
        raise ValueError(f"segments={options.segments}: must be 3 or more, stem and head included")
    start_platform("cpu", "0")
    announce("compiled for 2 H100, not run", options.out)
    resnets, segments = (("resnet8",), (6,)) if options.quick else (options.resnets, options.segments)
    models: dict[str, Chain] = {
        name: make_resnet(name, num_classes=10, stem="cifar", dtype="bfloat16") for name in resnets
    }
    models |= {f"chain of {count}": make_chain(count) for count in segments}
    rows = []
    for name, chain in models.items():
        progress(f"{name} ...")
        rows.append(measure(name, chain))
    write_rows(options.out / "own_costs.csv", rows)
    draw(options.out / "own_costs.png", rows)


if __name__ == "__main__":
    main(run, Options)
