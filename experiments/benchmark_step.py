"""How fast is a step on the CPU: ours, two ordinary ones in JAX, and PyTorch's DDP?

Same model, batch, float32, SGD with Nesterov momentum and weight decay, one batch of synthetic images that stays where
it is. Every way has processes of its own, and they take turns: the others sleep meanwhile.
    trjax      two AllReduces, launched from within the backward
    pmean      `shard_map`, one `jax.grad` of the whole loss, a `pmean` for every gradient, as flax's examples have it
    automatic  `jit` with a split batch
               (both with our model and its convolutions, and with the compiler's own options; `automatic` normalises
               with the statistics of the whole batch, the others with those of each device)
    DDP        PyTorch over gloo, channels last: one process a device; together they have a thread a core
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from report import Common, Row, announce, main, progress, require_positive, save_axes, write_rows

from trjax.launch import free_port

HERE = Path(__file__).parent
OURS, ORDINARY, DDP = "trjax", ("pmean", "automatic"), "DDP"
REQUIRED = 1.0
"""Ours over DDP's, images/s."""


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        arch: a name of `trjax.models.resnet.ARCHITECTURES`.
        width: channels of the first stage.
        stem: `cifar` or `imagenet`.
        size: of the images, pixels a side.
        num_classes: number of logits.
        batch: images, over all devices.
    """

    arch: str
    width: int
    stem: str
    size: int
    num_classes: int
    batch: int


MODELS = {
    "ResNet-20": Model("resnet20", 16, "cifar", 32, 10, 128),
    "ResNet-20, 4 x wide": Model("resnet20", 64, "cifar", 32, 10, 64),
    "ResNet-18, 32 px": Model("resnet18", 64, "cifar", 32, 10, 64),
    "ResNet-50, 64 px": Model("resnet50", 64, "imagenet", 64, 1000, 32),
}
QUICK = {"ResNet-8": Model("resnet8", 16, "cifar", 16, 10, 32)}


@dataclass(frozen=True)
class Options(Common):
    """Measure trjax's step, two ordinary JAX steps and PyTorch's, on one device and on two."""

    models: tuple[str, ...] = tuple(MODELS)
    """Models to train."""
    repeats: int = 9
    """Measured turns of each way, after one turn to warm up."""
    seconds: float = 1.5
    """Approximate length of a turn, in seconds."""
    peer: str = sys.executable
    """A Python that can import PyTorch; if it cannot, the table has no rows for PyTorch."""
    ordinary: bool = True
    """Also measure the ordinary JAX steps."""
    quick: bool = False
    """Measure three short turns of a ResNet-8 only, on two devices."""


class Way:
    """Processes that train side by side, and say when they are ready."""

    def __init__(self, commands: Sequence[Sequence[str]], variables: Sequence[dict[str, str]]) -> None:
        """Starts them.

        Args:
            commands: of each process.
            variables: of its environment.
        """
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.processes = [
            subprocess.Popen(command, text=True, env=os.environ | own, **pipes)
            for command, own in zip(commands, variables, strict=True)
        ]

    def answers(self) -> list[str]:
        """Returns a line of each process; "" if it has ended."""
        return [process.stdout.readline().strip() for process in self.processes if process.stdout]

    def train(self, steps: int) -> float:
        """Returns the seconds that this many steps take.

        Raises:
            ValueError: a process has ended.
        """
        with suppress(BrokenPipeError):
            for process in self.processes:
                print(steps, file=process.stdin, flush=True)
        answers = self.answers()
        if not all(answers):
            raise ValueError(f"{self.processes[0].args!r}: a process ended")
        return max(map(float, answers))

    def close(self) -> None:
        """Ends them."""
        for process in self.processes:
            process.kill()
            process.wait()


def start_ours(way: str, model: Model, devices: int) -> Way:
    """Returns a process with a step in JAX."""
    options = f"--platform cpu --devices 0-{devices - 1} --epochs 10000 --optim.warmup-epochs 0"
    options += f" --global-batch {model.batch} --model.arch {model.arch} --model.width {model.width}"
    options += f" --model.stem {model.stem} --data.source synthetic --data.num-classes {model.num_classes}"
    options += f" --data.train-examples {model.batch * 8} --data.test-examples {model.batch}"
    options += f" --data.image-shape {model.size} {model.size} 3"
    return Way([[sys.executable, str(HERE / "serve_step.py"), "--way", way, *options.split()]], [{}])


def start_ddp(python: str, model: Model, devices: int) -> Way:
    """Returns PyTorch's processes."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(devices)}
    numbers = model.size, model.num_classes, model.batch // devices, max(1, (os.cpu_count() or 1) // devices)
    command = [python, str(HERE / "torch_ddp.py"), model.arch, str(model.width), model.stem, *map(str, numbers)]
    return Way([command] * devices, [place | {"RANK": str(rank)} for rank in range(devices)])


@contextmanager
def start_all(options: Options, model: Model, devices: int) -> Iterator[dict[str, Way]]:
    """Starts every way, waits until they are ready, and ends them."""
    with ExitStack() as stack:
        names = (OURS, *(ORDINARY if options.ordinary else ()))
        ways = {name: start_ours(name, model, devices) for name in names}
        ways[DDP] = start_ddp(options.peer, model, devices)
        for way in ways.values():
            stack.callback(way.close)
        for name, way in list(ways.items()):
            said = way.answers()
            if not all(said):
                if name != DDP:
                    raise ValueError(f"{way.processes[0].args!r}: ended")
                del ways[name]
            progress(f"  {name}: {said[0] or 'left out'}")
        if len(ways) == 1:
            raise ValueError("there is nothing to compare with: install PyTorch, name a --peer, or leave --ordinary on")
        yield ways


def measure(options: Options, model: Model, devices: int) -> dict[str, np.ndarray]:
    """Returns every way's images/s, a number a turn."""
    with start_all(options, model, devices) as ways:
        steps = dict.fromkeys(ways, 1)
        for name, way in ways.items():
            way.train(1)
            steps[name] = max(1, round(options.seconds / way.train(1)))
        turns = [
            [model.batch * steps[name] / way.train(steps[name]) for name, way in ways.items()]
            for _ in range(options.repeats + 1)
        ]
    return dict(zip(ways, np.array(turns[1:]).T, strict=True))


def make_rows(name: str, model: Model, devices: int, rates: dict[str, np.ndarray]) -> list[Row]:
    """Returns a row for every way: the median and the range of its rate, and of ours over it in the same turn."""
    rows = []
    for way, found in rates.items():
        row: Row = {"model": name, "batch": model.batch, "devices": devices, "way": way}
        row |= {
            key: float(f"{pick(found):.4g}")
            for key, pick in (("images/s", np.median), ("least", np.min), ("most", np.max))
        }
        ratios = rates[OURS] / found
        row |= {"ours over it": "-", "least ratio": "-", "most ratio": "-", "required": "-", "met": "-"}
        if way != OURS:
            shown = (f"{pick(ratios):.2f}" for pick in (np.median, np.min, np.max))
            row |= dict(zip(("ours over it", "least ratio", "most ratio"), shown, strict=True))
        if way == DDP:
            row |= {"required": f">= {REQUIRED:g}", "met": "yes" if np.median(ratios) >= REQUIRED else "no"}
        rows.append(row)
    return rows


def draw(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draws the rate of ours over each other way's, with its range."""
    shown = [row for row in rows if row["way"] != OURS]
    ways = list(dict.fromkeys(row["way"] for row in shown))
    cases = list(dict.fromkeys((row["model"], row["devices"]) for row in shown))
    figure = Figure(figsize=(8, 1.2 + 0.32 * len(ways) * len(cases)), layout="constrained")
    axes = figure.subplots()
    colors = dict(zip((*ORDINARY, DDP), ("#9ecae1", "#6baed6", "#08519c"), strict=True))
    height = 0.8 / len(ways)
    for number, way in enumerate(ways):
        own = {(row["model"], row["devices"]): row for row in shown if row["way"] == way}
        places = [index + (number - (len(ways) - 1) / 2) * height for index in range(len(cases))]
        values = np.array(
            [[float(own[case][key]) for case in cases] for key in ("ours over it", "least ratio", "most ratio")]
        )
        spread = [values[0] - values[1], values[2] - values[0]]
        axes.barh(places, values[0], height, xerr=spread, color=colors[way], label=way, error_kw={"linewidth": 1})
        for place, value, most in zip(places, values[0], values[2], strict=True):
            note = axes.annotate(f"{value:.2f}", (most, place), (4, 0), textcoords="offset points", va="center")
            note.set(fontsize="small", bbox={"color": "white", "pad": 0.5})
    axes.axvline(REQUIRED, color="#d62728", linewidth=1.5, label="as fast")
    axes.set_yticks(
        range(len(cases)), [f"{name}\n{devices} device{'s' if devices > 1 else ''}" for name, devices in cases]
    )
    axes.invert_yaxis()
    axes.set_xlabel("images/s of trjax over those of another way")
    axes.margins(x=0.1)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    save_axes(path, figure, axes, title)


def run(options: Options) -> None:
    """Runs the experiment, prints the table and writes the files."""
    require_positive(repeats=options.repeats, seconds=options.seconds)
    if unknown := set(options.models) - set(MODELS):
        raise ValueError(f"models={' '.join(sorted(unknown))}: unknown; known: {', '.join(MODELS)}")
    if options.quick:
        options = replace(options, repeats=3, seconds=0.3)
    models = QUICK if options.quick else {name: MODELS[name] for name in options.models}
    announce(f"{os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.1f}", options.out)
    rows: list[Row] = []
    for name, model in models.items():
        for devices in (2,) if options.quick else (1, 2):
            progress(f"{name}, {devices} device{'s' if devices > 1 else ''}:")
            rows += make_rows(name, model, devices, measure(options, model, devices))
    write_rows(options.out / "benchmark_step.csv", rows)
    draw(options.out / "benchmark_step.png", f"float32, {options.repeats} turns of about {options.seconds:g} s", rows)


if __name__ == "__main__":
    main(run, Options)
