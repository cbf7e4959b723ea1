"""Sources of examples with one interface: a length, and `read` by index."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from trjax.config.data import FROM_FILES, DataConfig
from trjax.data.arrays import load_npz
from trjax.data.cifar import load_cifar
from trjax.data.folders import open_splits
from trjax.data.image_files import ImageFileSource, count_cores
from trjax.data.spec import DataSpec
from trjax.memory import require_memory

_MOST_WORKERS = 16


class Source(Protocol):
    """Labelled images by index, in a fixed order of their own; a streamed source decodes in `read`."""

    @property
    def workers(self) -> int:
        """Threads that are to read ahead; 0: none."""

    @property
    def problems(self) -> Mapping[str, str]:
        """What was wrong with the examples that could not be read so far, by their names."""

    def __len__(self) -> int:
        """Returns the number of examples."""

    def read(self, indices: np.ndarray, epoch: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns uint8 images, shape (len(indices), height, width, channels), and int32 labels.

        Args:
            indices: of the examples.
            epoch: of the training that they are for; None: for an evaluation.
        """


@dataclass(frozen=True)
class ArraySource:
    """Examples that lie in memory."""

    images: np.ndarray
    labels: np.ndarray
    workers: ClassVar[int] = 0
    problems: ClassVar[Mapping[str, str]] = {}

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self.labels)

    def read(self, indices: np.ndarray, epoch: int | None = None) -> tuple[np.ndarray, np.ndarray]:
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

    @property
    def workers(self) -> int:
        """Threads that are to read ahead."""
        return self.source.workers

    @property
    def problems(self) -> Mapping[str, str]:
        """What was wrong with examples."""
        return self.source.problems

    def __len__(self) -> int:
        """Returns the number of examples."""
        return self.count

    def read(self, indices: np.ndarray, epoch: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the images and labels at `indices`."""
        return self.source.read(indices, epoch)


# Means and deviations of the training pixels: digits' computed from this split (a test repeats it), CIFAR's and
# ImageNet's as torchvision's and most public recipes use them.
_CIFAR10 = DataSpec((32, 32, 3), 10, 50_000, 10_000, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_CIFAR100 = DataSpec((32, 32, 3), 100, 50_000, 10_000, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
_DIGITS = DataSpec((8, 8, 1), 10, 1_437, 360, (0.3053,), (0.3760,))

# Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998 (CC BY 4.0), as scikit-learn has and
# splits them, classes in proportion: importing that takes two seconds.
_DIGITS_FILE = Path(__file__).with_name("digits.npz")
_IMAGENET_SIZES = (1000, 1_281_167, 50_000)  # classes, training and test examples
_IMAGE_SHAPE = (224, 224, 3)
_CIFAR10_NAMES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree
wolf woman worm
"""
_CLASS_NAMES = {"digits": "0 1 2 3 4 5 6 7 8 9", "cifar10": _CIFAR10_NAMES, "cifar100": _CIFAR100_NAMES}


def _describe_images(data: DataConfig) -> DataSpec:
    """Returns the shapes and sizes of images; without a root, those of ImageNet's 2012 challenge."""
    sizes = (data.num_classes, data.train_examples, data.test_examples)
    if not data.num_classes and not data.root and data.source == "imagenet":
        sizes = _IMAGENET_SIZES
    elif not data.num_classes:
        train, test = open_splits(data.root)
        sizes = (len(train.classes), len(train), len(test))
    height, width, channels = data.image_shape or _IMAGE_SHAPE
    return DataSpec((height, width, channels), *sizes, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def _load_images(data: DataConfig, seed: int) -> tuple[Source, Source]:
    train, test = open_splits(data.root)
    height, width, _ = data.image_shape or _IMAGE_SHAPE
    workers = data.workers or min(_MOST_WORKERS, count_cores())
    make = partial(ImageFileSource, size=(height, width), seed=seed, least_area=data.least_area)
    make = partial(make, stops=data.on_error == "stop", workers=workers)
    return make(train), make(test)


def describe(data: DataConfig) -> DataSpec:
    """Returns the shapes and sizes of a source without loading it.

    Raises:
        ValueError: they are those of files, which are missing or damaged.
    """
    if data.source == "synthetic":
        height, width, channels = data.image_shape or (32, 32, 3)
        sizes = (data.num_classes or 10, data.train_examples or 2048, data.test_examples or 512)
        return DataSpec((height, width, channels), *sizes, (0.5,) * channels, (0.25,) * channels)
    if data.source == "npz":
        return load_npz(data.root)[0]
    if data.source in ("images", "imagenet"):
        return _describe_images(data)
    return {"digits": _DIGITS, "cifar10": _CIFAR10, "cifar100": _CIFAR100}[data.source]


def class_names(data: DataConfig, num_classes: int) -> tuple[str, ...]:
    """Returns the name of every class, in the order of the labels.

    >>> class_names(DataConfig(source="cifar10"), 10)[3], class_names(DataConfig(source="synthetic"), 2)
    ('cat', ('class 0', 'class 1'))
    """
    known = tuple(_CLASS_NAMES.get(data.source, "").split())
    if data.source in ("images", "imagenet") and data.root:
        with suppress(ValueError):  # the images are no longer there
            known = open_splits(data.root)[0].classes
    return known or tuple(f"class {index}" for index in range(num_classes))


def resolve(data: DataConfig) -> DataConfig:
    """Returns the options with the numbers in them that are those of files: a run keeps them.

    Raises:
        ValueError: the files are missing or damaged.
    """
    if data.source not in FROM_FILES or data.num_classes:
        return data
    spec = describe(data)
    return replace(
        data, num_classes=spec.num_classes, train_examples=spec.train_examples, test_examples=spec.test_examples
    )


def load(data: DataConfig, seed: int = 0) -> tuple[Source, Source]:
    """Returns the training and the test source.

    Args:
        data: the options.
        seed: of the run, for random crops of images.

    Raises:
        ValueError: files are missing or damaged; says which, what was expected and where to get it. Or synthetic
            examples do not fit into memory.
    """
    if data.source in ("images", "imagenet"):
        return _load_images(data, seed)
    if data.source == "synthetic":
        spec = describe(data)
        _check_synthetic(spec)
        return _synthesise(spec, spec.train_examples, 0), _synthesise(spec, spec.test_examples, 1)
    if data.source in ("cifar10", "cifar100"):
        train, test = load_cifar(data.source, data.root)
    else:
        _, train, test = load_npz(str(_DIGITS_FILE) if data.source == "digits" else data.root)
    return ArraySource(*train), ArraySource(*test)


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
