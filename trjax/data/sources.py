"""Sources of examples, all behind one interface: a length, and `read` by index."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trjax.config import DataConfig
from trjax.data.cifar import load_cifar
from trjax.memory import require_memory


class Source(Protocol):
    """Labelled images by index, in a fixed order of their own; a streamed source decodes in `read`."""

    def __len__(self) -> int:
        """Returns the number of examples."""

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns uint8 images, shape (len(indices), height, width, channels), and int32 labels."""


@dataclass(frozen=True)
class ArraySource:
    """Examples that lie in memory."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self.labels)

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the images and labels at `indices`."""
        return self.images[indices], self.labels[indices]


@dataclass(frozen=True)
class FirstOf:
    """The first examples of a source.

    Attributes:
        source: that has them.
        count: how many.
    """

    source: Source
    count: int

    def __len__(self) -> int:
        """Returns the number of examples."""
        return self.count

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the images and labels at `indices`."""
        return self.source.read(indices)


@dataclass(frozen=True)
class DataSpec:
    """What a model needs to know of a source: enough to plan and compile without loading it.

    Attributes:
        image_shape: height, width, channels.
        num_classes: number of labels.
        train_examples: length of the training source.
        test_examples: length of the test source.
        mean: per channel, of pixels scaled to [0, 1].
        std: likewise.
    """

    image_shape: tuple[int, int, int]
    num_classes: int
    train_examples: int
    test_examples: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


# Means and deviations of the training pixels: digits' computed from this split (a test repeats it), CIFAR's and
# ImageNet's as torchvision's and most public recipes use them.
_CIFAR10 = DataSpec((32, 32, 3), 10, 50_000, 10_000, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_CIFAR100 = DataSpec((32, 32, 3), 100, 50_000, 10_000, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
_DIGITS = DataSpec((8, 8, 1), 10, 1_437, 360, (0.3053,), (0.3760,))


def describe(data: DataConfig) -> DataSpec:
    """Returns the shapes and sizes of a source without loading it."""
    if data.source in ("synthetic", "imagenet"):
        imagenet = data.source == "imagenet"
        height, width, channels = data.image_shape or ((224, 224, 3) if imagenet else (32, 32, 3))
        mean, std = (0.5,) * channels, (0.25,) * channels
        if not imagenet:
            sizes = (data.num_classes or 10, data.train_examples or 2048, data.test_examples or 512)
            return DataSpec((height, width, channels), *sizes, mean, std)
        if channels == 3:
            mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        return DataSpec((height, width, channels), 1000, 1_281_167, 50_000, mean, std)
    return {"digits": _DIGITS, "cifar10": _CIFAR10, "cifar100": _CIFAR100}[data.source]


def load(data: DataConfig) -> tuple[Source, Source]:
    """Returns the training and the test source.

    Raises:
        ValueError: files are missing or damaged; says which, what was expected and where to get it. Or synthetic
            examples do not fit into memory.
    """
    if data.source == "digits":
        return _load_digits()
    if data.source in ("cifar10", "cifar100"):
        train, test = load_cifar(data.source, data.root)
        return ArraySource(*train), ArraySource(*test)
    if data.source == "synthetic":
        spec = describe(data)
        _check_synthetic(spec)
        return _synthesise(spec, spec.train_examples, 0), _synthesise(spec, spec.test_examples, 1)
    raise ValueError(
        "data.source=imagenet: this version does not read image folders; "
        "run its shapes with --data.source synthetic --data.image-shape 224 224 3 --data.num-classes 1000"
    )


def _load_digits() -> tuple[ArraySource, ArraySource]:
    """Returns scikit-learn's 1797 digits, split once and for all into 1437 and 360, classes in proportion."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.rint(digits.images[..., None] * (255 / 16)).astype(np.uint8)
    labels = digits.target.astype(np.int32)
    train, test = train_test_split(np.arange(len(labels)), test_size=360, stratify=labels, random_state=0)
    return ArraySource(images[train], labels[train]), ArraySource(images[test], labels[test])


def _check_synthetic(spec: DataSpec) -> None:
    """Raises ValueError for examples, or patterns of classes, that this machine cannot hold."""
    examples, pixels = spec.train_examples + spec.test_examples, math.prod(spec.image_shape)
    shape = "x".join(map(str, spec.image_shape))
    require_memory(
        f"data.source=synthetic with {examples} examples of {shape} and {spec.num_classes} classes",
        examples * (pixels + 4) + 2 * spec.num_classes * pixels,  # patterns, and the random numbers they are made of
        "use fewer or smaller ones: data.train_examples, data.test_examples, data.image_shape, data.num_classes",
    )


def _synthesise(spec: DataSpec, num_examples: int, stream: int) -> ArraySource:
    """Returns noise around one random pattern a class: learnable, and any shape."""
    pattern_random = np.random.Generator(np.random.Philox(key=0))
    random = np.random.Generator(np.random.Philox(key=[1, stream]))
    height, width, channels = spec.image_shape
    cells = pattern_random.integers(64, 192, (spec.num_classes, -(-height // 4), -(-width // 4), channels))
    patterns = cells.astype(np.uint8).repeat(4, 1).repeat(4, 2)[:, :height, :width]
    labels = random.integers(0, spec.num_classes, num_examples, dtype=np.int32)
    images = np.empty((num_examples, *spec.image_shape), np.uint8)
    for start in range(0, num_examples, 256):  # in pieces: the noise of all at once would double the memory
        chunk = slice(start, start + 256)
        noise = random.integers(-64, 64, images[chunk].shape, dtype=np.int16)
        images[chunk] = patterns[labels[chunk]] + noise
    return ArraySource(images, labels)
