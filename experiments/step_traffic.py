"""What moves through a GPU's memory in a train step of ResNet-50, and what is the least that has to?

Compiled for one H100, and counted by hand from the shapes, by the part of the step that moves it. By hand: every
convolution and product is a kernel of its own, which reads what it needs and writes what it makes once; BatchNorm
reads its input for the moments and once more to be applied, and its cotangent likewise; whatever else is elementwise
rides along, gradients of pooling included.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from machines import compile_for, h100s
from matplotlib.figure import Figure
from report import Common, Row, announce, main, require_positive, save_axes, write_rows

from trjax.config.presets import preset_config
from trjax.mesh import start_platform
from trjax.models.resnet import ARCHITECTURES
from trjax.xla.operations import Operation

PARTS = ("convolutions", "products of channels", "BatchNorm, ReLU, sums", "stem", "parameters")
CONVOLUTIONS, PRODUCTS, NORMS, STEM, PARAMETERS = PARTS


@dataclass(frozen=True)
class Options(Common):
    """Count the bytes that each part of a compiled step moves, and the least that it has to move."""

    batch: int = 256
    """Images of a step."""
    remat: bool = False
    """Also compile the step with `--remat block`."""
    quick: bool = False
    """Use eight images."""


def least_bytes(batch: int) -> Counter[str]:
    """Returns the bytes of a step of ResNet-50 by part, by hand: images of 224 x 224, bfloat16."""
    size, num_bytes = 224, 2
    moved: Counter[str] = Counter()

    def array(channels: int, side: int) -> int:
        return batch * channels * side * side * num_bytes

    shape = ARCHITECTURES["resnet50"]
    width, side = shape.width, size // 2
    image, stem, pooled = array(3, size), array(width, side), array(width, side // 2)
    place = pooled // num_bytes
    moved[STEM] += image // num_bytes + image  # as they come, and normalised
    moved[STEM] += 2 * (image + stem)  # the convolution, and its kernel's gradient
    moved[STEM] += stem + stem + pooled + place  # moments; applied and pooled in one
    moved[STEM] += pooled + place + stem  # the pooling's gradient
    moved[STEM] += 2 * stem + 3 * stem  # BatchNorm's
    channels, side = width, side // 2
    elements = 7 * 7 * 3 * width
    for stage, blocks in enumerate(shape.blocks):
        inside, outside = width * 2**stage, 4 * width * 2**stage
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            below, first = array(channels, side), array(inside, side)
            second, above = array(inside, side // stride), array(outside, side // stride)
            seen, shortcut = array(channels, side // stride), above if block == 0 else below
            moved[CONVOLUTIONS] += below + first + first + second + second + shortcut + above
            moved[CONVOLUTIONS] += 2 * second + above + 2 * second  # the third's input gradient, in two
            moved[CONVOLUTIONS] += 2 * (second + first) + 2 * first + 3 * below
            moved[NORMS] += 3 * first + 3 * second + 5 * first + 5 * second
            moved[NORMS] += 3 * above  # the cotangent of the block's sum, under its ReLU
            moved[PRODUCTS] += second + second + above
            elements += channels * inside + 9 * inside * inside + inside * outside
            if block == 0:
                moved[CONVOLUTIONS] += seen + above + 2 * seen + above + 2 * seen
                moved[PRODUCTS] += seen + seen + above
                moved[NORMS] += 2 * (below + seen) if stride > 1 else 0  # every second pixel, and back
                elements += channels * outside
            channels, side = outside, side // stride
    elements += 1000 * channels
    moved[PARAMETERS] += elements * (4 + num_bytes)  # cast
    moved[PARAMETERS] += elements * (num_bytes + 4)  # gathered for the sum
    moved[PARAMETERS] += elements * 4 * (1 + 2 + 2)  # sum, and parameter and momentum there and back
    return moved


def part_of(operation: Operation) -> str:
    """Returns the part of the step that an operation belongs to, by where it comes from."""
    if "Stem" in operation.source:
        return STEM
    if operation.kind == "convolution":
        return CONVOLUTIONS
    if operation.kind == "matmul" or "norm/dot_general" in operation.source:
        return PRODUCTS
    casts_kernel = operation.source.endswith("conv/convert_element_type")
    return NORMS if "Block" in operation.source and not casts_kernel else PARAMETERS


def draw(path: Path, rows: Sequence[Row], columns: dict[str, str]) -> None:
    """Draws the parts of each column on top of each other."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    below = [0.0] * len(columns)
    for row in rows[:-1]:
        bars = axes.bar(list(columns.values()), [row[name] for name in columns], 0.5, bottom=below, label=row["part"])
        large = [f"{row[name]:.1f}" if row[name] > 0.04 * rows[-1][name] else "" for name in columns]
        axes.bar_label(bars, large, label_type="center", color="white")
        below = [height + row[name] for height, name in zip(below, columns, strict=True)]
    axes.set_ylabel("GB a step")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5))
    save_axes(path, figure, axes, "Memory traffic of a ResNet-50 step, bfloat16, one H100")


def run(options: Options) -> None:
    """Runs the experiment, prints the table and writes the files."""
    require_positive(batch=options.batch)
    start_platform("cpu", "0")
    announce("compiled for one H100, not run", options.out)
    batch = 8 if options.quick else options.batch
    found = {"least": least_bytes(batch)}
    config = replace(preset_config("imagenet-resnet50"), global_batch=batch)
    runs = {"compiled": config} | ({"remat block": replace(config, remat="block")} if options.remat else {})
    for name, run_config in runs.items():
        moved: Counter[str] = Counter()
        for operation in compile_for(h100s("1x1"), run_config).operations:
            moved[part_of(operation)] += operation.read_bytes + operation.written_bytes
        found[name] = moved
    for moved in found.values():
        moved["all"] = moved.total()
    rows = [
        {"part": part} | {f"{name} GB": round(moved[part] / 1e9, 3) for name, moved in found.items()}
        for part in (*PARTS, "all")
    ]
    write_rows(options.out / "step_traffic.csv", rows)
    draw(options.out / "step_traffic.png", rows, {f"{name} GB": name for name in found})


if __name__ == "__main__":
    main(run, Options)
