"""`python -m trjax.preview`: a sheet of training images, as the network gets them."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from PIL import Image, ImageDraw

from trjax.commands import print_result
from trjax.config.command_line import parse_options
from trjax.config.run import Config
from trjax.data.batches import epoch_order, read_batch
from trjax.data.names import class_names
from trjax.data.sources import describe, load
from trjax.files import atomic_write
from trjax.mesh import start_platform
from trjax.step.limits import count_examples
from trjax.step.program import make_prepare

_LEAST_SIDE = 96  # of an image on the sheet: smaller ones are shown larger, each of their pixels as a square
_TEXT_HEIGHT, _GAP = 14, 4
_CLEAR = 0.1  # share of a class from which it is named


@dataclass(frozen=True)
class PreviewOptions:
    """What to show."""

    out: str = "sheet.png"
    """File to write."""
    count: int = 32
    """Images to show: the first ones of an epoch."""
    epoch: int = 1
    """Which one, from 1."""


@dataclass(frozen=True)
class Shown:
    """Training images as a network gets them.

    Attributes:
        images: values in [0, 1], float32, shape (count, height, width, channels).
        targets: probabilities of the classes, shape (count, classes); none of an image that cannot be read.
    """

    images: np.ndarray
    targets: np.ndarray


def read_inputs(config: Config, count: int, epoch: int) -> Shown:
    """Returns the first images of an epoch after everything that a training step does to them, but for normalisation.

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
    return Shown(pixels[:count].clip(0, 1), known[:count])


def _caption(targets: np.ndarray, names: Sequence[str]) -> str:
    """Returns the name of an image's class; of several, each with its share.

    >>> _caption(np.array([0.02, 0.7, 0.28]), ["cat", "dog", "fox"])
    'dog 70% fox 28%'
    """
    likely = [int(index) for index in np.argsort(-targets, stable=True)[:2] if targets[index] >= _CLEAR]
    if len(likely) == 1:
        return names[likely[0]]
    return " ".join(f"{names[index]} {targets[index]:.0%}" for index in likely) or "(unreadable)"


def draw_sheet(shown: Shown, names: Sequence[str]) -> Image.Image:
    """Returns the images in rows, each with its class below.

    Raises:
        ValueError: they have neither one channel nor three.
    """
    count, height, width, channels = shown.images.shape
    if channels not in (1, 3):
        raise ValueError(f"images of {channels} channels cannot be shown; only those of 1 or 3")
    pixels = np.rint(shown.images * 255).astype(np.uint8)
    if channels == 1:
        pixels = pixels.repeat(3, axis=-1)
    scale = -(-_LEAST_SIDE // max(height, width))
    pixels = pixels.repeat(scale, axis=1).repeat(scale, axis=2)
    across, columns = width * scale + _GAP, math.ceil(math.sqrt(count))
    down = height * scale + _TEXT_HEIGHT + _GAP
    sheet = Image.new("RGB", (columns * across + _GAP, -(-count // columns) * down + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for index in range(count):
        left, top = _GAP + index % columns * across, _GAP + index // columns * down
        text = _caption(shown.targets[index], names).encode("ascii", "replace").decode()  # all that every font has
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
    path = Path(options.out)
    if not 1 <= options.count <= 10_000 or options.epoch < 1:
        raise ValueError(
            f"count={options.count}, epoch={options.epoch}: from 1 to 10,000 images, of an epoch from 1 on"
        )
    if path.suffix.lower() != ".png":
        raise ValueError(f"out={options.out}: its ending must be .png")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: its folder does not exist")
    start_platform("cpu", "all")  # no GPU is needed
    shown = read_inputs(config, options.count, options.epoch - 1)
    sheet = draw_sheet(shown, class_names(config.data, shown.targets.shape[1]))
    with atomic_write(path) as partial:
        sheet.save(partial, "PNG")
    count, height, width, _ = shown.images.shape
    return f"{path}: {count} training images of {height}x{width}, epoch {options.epoch}, seed {config.seed}"


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code: 0, or 2 for a mistake."""
    return print_result(lambda: preview(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
