"""`python -m trjax.predict RUN IMAGE ...`: what a trained model sees in images."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro
from PIL import Image

from trjax.commands import run_command
from trjax.data.images import open_image
from trjax.data.jpeg import BadImageError
from trjax.data.sources import class_names
from trjax.run.saved_model import Which, open_model, predict, top_classes
from trjax.text import format_table


@dataclass(frozen=True)
class PredictOptions:
    """Print the classes that a run's model finds most likely for each image."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    images: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Image files, in any format that Pillow reads."""
    checkpoint: Which = "best"
    """Which one of the run."""
    raw: bool = False
    """The last parameters, also where the run keeps running means."""
    top: int = 5
    """Classes to print."""


def read_image(path: Path, image_shape: tuple[int, int, int]) -> np.ndarray:
    """Returns an image as a model wants it: its shorter side resized, the middle cut out; uint8.

    Raises:
        ValueError: it is no image.
        OSError: it cannot be read.
    """
    height, width, channels = image_shape
    if channels not in (1, 3):
        raise ValueError(f"{path}: the model wants images of {channels} channels, which no image file has")
    try:
        image = Image.fromarray(open_image(path.read_bytes()).decode()).convert("RGB" if channels == 3 else "L")
    except BadImageError as error:
        raise ValueError(f"{path} cannot be used: {error}") from error
    scale = max(height / image.height, width / image.width)
    size = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    left, upper = (size[0] - width) // 2, (size[1] - height) // 2
    resized = image.resize(size, Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((left, upper, left + width, upper + height))).reshape(height, width, channels)


def classify(options: PredictOptions) -> str:
    """Returns the table of the likeliest classes of each image.

    Raises:
        ValueError: there is no run, or something is no image.
        OSError: an image cannot be read.
    """
    if options.top < 1 or not options.images:
        raise ValueError(f"top={options.top}, {len(options.images)} images: there must be at least one of both")
    model = open_model(options.run, options.checkpoint, options.raw)
    names = class_names(model.config.data, model.spec.num_classes)
    images = np.stack([read_image(path, model.spec.image_shape) for path in options.images])
    logits = np.asarray(jax.jit(lambda images: predict(model, images))(images))
    rows = [
        [path, names[index], f"{share:.2%}"]
        for path, own in zip(options.images, logits, strict=True)
        for index, share in top_classes(own, options.top)
    ]
    return format_table(["image", "class", "probability"], rows)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code: 0, or 2 for a mistake."""
    return run_command("python -m trjax.predict", PredictOptions, classify, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
