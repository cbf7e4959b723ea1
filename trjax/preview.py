"""`python -m trjax.preview`: a sheet of training images, as the network gets them."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
from PIL import Image, ImageDraw
from pydantic import Field

from trjax.commands import print_result
from trjax.config.checks import Checked
from trjax.config.command_line import parse_options
from trjax.config.fields import PositiveInt32
from trjax.config.run import Config
from trjax.data.batches import epoch_order, read_batch
from trjax.data.sources import class_names, describe, load
from trjax.files import atomic_write
from trjax.mesh import start_platform
from trjax.step.limits import count_examples
from trjax.step.program import make_prepare

_LEAST_SIDE = 96  # of an image on the sheet: smaller ones are shown larger, each of their pixels as a square
_TEXT_HEIGHT, _GAP = 14, 4
_CLEAR = 0.1  # share of a class from which it is named


@dataclass(frozen=True)
class PreviewOptions(Checked):
    """What to show."""

    out: Path = Path("sheet.png")
    """File to write."""
    count: Annotated[int, Field(ge=1, le=10_000)] = 32
    """Images to show: the first ones of an epoch."""
    epoch: PositiveInt32 = 1
    """Epoch whose images to show, from 1."""


def read_inputs(config: Config, count: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first images of an epoch after everything that a training step does to them, but for normalisation.

    Their values are in [0, 1], float32, shape (count, height, width, channels). With them come the probabilities of
    their classes, shape (count, classes); all are 0 for an image that cannot be read.

    Args:
        config: the run.
        count: how many; fewer, if there are fewer.
        epoch: from 0.

    Raises:
        ValueError: the source cannot be loaded.
    """
    spec = describe(config.data)
    order = epoch_order(config.seed, epoch, count_examples(config, spec))[: count + count % 2]
    rows = np.arange(len(order) + len(order) % 2)  # images are mixed in pairs, those of a batch with an even number
    block = read_batch(load(config.data, config.seed)[0], order, rows, epoch)
    inputs = jax.jit(make_prepare(config, config.data.size_at(epoch)))(block, np.int32(epoch))
    targets = jax.nn.one_hot(block.labels, spec.num_classes) if inputs.targets is None else inputs.targets
    pixels = np.asarray(inputs.images) * np.array(spec.std, np.float32) + np.array(spec.mean, np.float32)
    known = np.asarray(targets) * block.mask[:, None]
    count = min(count, len(order))
    return pixels[:count].clip(0, 1), known[:count]


def _caption(targets: np.ndarray, names: Sequence[str]) -> str:
    """Returns the name of an image's class; of several, each with its share.

    >>> _caption(np.array([0.02, 0.7, 0.28]), ["cat", "dog", "fox"])
    'dog 70% fox 28%'
    """
    likely = [int(index) for index in np.argsort(-targets, stable=True)[:2] if targets[index] >= _CLEAR]
    if len(likely) == 1:
        return names[likely[0]]
    return " ".join(f"{names[index]} {targets[index]:.0%}" for index in likely) or "(unreadable)"


def draw_sheet(images: np.ndarray, targets: np.ndarray, names: Sequence[str]) -> Image.Image:
    """Returns the images in rows, each with its class below.

    Raises:
        ValueError: they have neither one channel nor three.
    """
    count, height, width, channels = images.shape
    if channels not in (1, 3):
        raise ValueError(f"images of {channels} channels cannot be shown; only those of 1 or 3")
    pixels = np.broadcast_to(np.rint(images * 255).astype(np.uint8), (count, height, width, 3))
    scale = -(-_LEAST_SIDE // max(height, width))
    pixels = pixels.repeat(scale, axis=1).repeat(scale, axis=2)
    across, columns = width * scale + _GAP, math.ceil(math.sqrt(count))
    down = height * scale + _TEXT_HEIGHT + _GAP
    sheet = Image.new("RGB", (columns * across + _GAP, -(-count // columns) * down + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for index in range(count):
        left, top = _GAP + index % columns * across, _GAP + index // columns * down
        text = _caption(targets[index], names).encode("ascii", "replace").decode()  # all that every font has
        while text and draw.textlength(text) > across - _GAP:
            text = text[:-1]
        draw.text((left, top + height * scale), text, fill="black")
        sheet.paste(Image.fromarray(pixels[index]), (left, top))
    return sheet


def preview(arguments: Sequence[str]) -> str:
    """Writes the sheet that a command line asks for, and returns what is on it.

    Raises:
        ValueError: an option is impossible, or the source cannot be loaded.
        OSError: the file cannot be written.
    """
    purpose = "Draw a sheet of training images as the network gets them."
    config, options = parse_options(arguments, "python -m trjax.preview", purpose, PreviewOptions())
    if options.out.suffix.lower() != ".png":
        raise ValueError(f"out={options.out}: its ending must be .png")
    if not options.out.parent.is_dir():
        raise ValueError(f"{options.out}: its folder does not exist")
    start_platform("cpu", "all")  # no GPU is needed
    images, targets = read_inputs(config, options.count, options.epoch - 1)
    sheet = draw_sheet(images, targets, class_names(config.data, targets.shape[1]))
    with atomic_write(options.out) as partial:
        sheet.save(partial, "PNG")
    count, height, width, _ = images.shape
    return f"{options.out}: {count} training images of {height}x{width}, epoch {options.epoch}, seed {config.seed}"


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code: 0, or 2 for a mistake."""
    return print_result(lambda: preview(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
