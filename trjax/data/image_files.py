"""A source of examples that are images in files: read and decoded when they are asked for."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from trjax.data.images import example_random, read_for_evaluation, read_for_training
from trjax.data.jpeg import BadImageError

UNREADABLE = -1
"""Label of an example that could not be read: it counts for nothing, as padding does."""
ReportProgress = Callable[[str, int, int], None]
"""Is called with what is read (a split, a file), how much of it is done, and the total; total 0: not known."""


def count_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Encoded(NamedTuple):
    """An image as it is stored.

    Attributes:
        data: of its file.
        label: of its class.
    """

    data: bytes
    label: int


class ImageFiles(Protocol):
    """Stored images by index, in a fixed order of their own; read by several threads at a time."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels."""

    def __len__(self) -> int:
        """Returns the number of images."""

    def name(self, index: int) -> str:
        """Returns what an image's file is, or was, called."""

    def read(self, index: int) -> Encoded:
        """Returns an image.

        Raises:
            OSError: it cannot be read.
        """


@dataclass(frozen=True)
class ImageFileSource:
    """Images as a network gets them.

    Attributes:
        files: the images as they are stored.
        size: height and width to come to.
        seed: of random crops.
        least_area: smallest share of an image that such a crop may be.
        stops: an example that cannot be read is an error; otherwise it is left out.
        workers: threads that are to read ahead.
        problems: what was wrong with such examples, by their names.
    """

    files: ImageFiles
    size: tuple[int, int]
    seed: int = 0
    least_area: float = 0.08
    stops: bool = False
    workers: int = 0
    problems: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self.files)

    def _read_one(self, index: int, epoch: int | None, pixels: np.ndarray) -> int:
        """Fills in an example's pixels, and returns its label."""
        try:
            data, label = self.files.read(index)
            if epoch is None:
                pixels[:] = read_for_evaluation(data, self.size)
            else:
                random = example_random(self.seed, epoch, index)
                read_for_training(data, self.size, random, self.least_area, pixels)
        except (BadImageError, OSError) as error:
            name = self.files.name(index)
            if self.stops:
                raise ValueError(f"{name}: {error}; mend or remove it, or pass --data.on-error skip") from error
            self.problems[name], pixels[:] = str(error), 0
            return UNREADABLE
        return label

    def read(self, indices: np.ndarray, epoch: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the examples at `indices`: random crops of an epoch, or what an evaluation sees.

        Raises:
            ValueError: one cannot be read, and that is to be an error.
        """
        images = np.empty((len(indices), *self.size, 3), np.uint8)
        labels = [self._read_one(int(index), epoch, images[at]) for at, index in enumerate(indices)]
        return images, np.array(labels, np.int32)
