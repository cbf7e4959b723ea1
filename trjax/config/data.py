"""Options of the data."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from trjax.config.checks import Checked
from trjax.config.fields import INCREASING, INT_LIMIT, MAY_CHANGE, NonNegativeInt32, PositiveInt32, Text, rule, zero_or

FROM_FILES = ("imagenet", "images", "npz")
"""Sources whose classes and sizes are those of the files below their root."""
_SHAPE = rule(
    lambda shape: not shape or (len(shape) == 3 and min(shape) > 0 and math.prod(shape) < INT_LIMIT),
    "must be height, width, channels, all positive, less than 2^31 bytes in all",
)
_MixingShape = Annotated[float, zero_or(1e-3, 1e3, "to disable it")]


@dataclass(frozen=True)
class DataConfig(Checked):
    """Where examples come from and how they are varied."""

    section = "data."

    source: Literal["digits", "cifar10", "cifar100", "imagenet", "images", "npz", "synthetic"] = "digits"
    """Digits are in the package; images are image files in folders train/CLASS and val/CLASS, or packed; imagenet is
    such a folder too; npz is a file of arrays; synthetic is noise that depends on the class."""
    root: Annotated[Text, MAY_CHANGE] = ""
    """Folder that holds the archives or extracted files (CIFAR), or the image files; npz: the file, with train_images,
    train_labels, test_images, test_labels."""
    image_shape: Annotated[tuple[int, ...], _SHAPE] = ()
    """Height, width, channels; of image files and synthetic, where empty means 224 224 3 and 32 32 3."""
    num_classes: NonNegativeInt32 = 0
    """Synthetic, where 0 means 10; of files: what was found in them, which a run writes down."""
    train_examples: NonNegativeInt32 = 0
    """Training examples of data.source=synthetic; 0 means 2048. Of files: the number found in them."""
    test_examples: NonNegativeInt32 = 0
    """Test examples of data.source=synthetic; 0 means 512. Of files: the number found in them."""
    on_error: Annotated[Literal["skip", "stop"], MAY_CHANGE] = "skip"
    """What becomes of an image that cannot be read: it is named and counts for nothing, or the run stops."""
    workers: Annotated[NonNegativeInt32, MAY_CHANGE] = 0
    """Threads that read images ahead; 0: as many as this process may use cores, 16 at most."""
    least_area: Annotated[float, Field(gt=0, le=1)] = 0.08
    """Smallest share of an image that a random crop shows."""
    crop_padding: NonNegativeInt32 = 0
    """Random crop after padding every side with this many zero pixels."""
    flip: bool = False
    """Mirror half of the training images, left to right."""
    trivial_augment: bool = False
    """Do one operation of TrivialAugment, at one strength, to each training image."""
    sizes: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = ()
    """Sides to which training images are resized, one after the other, before they come in their own."""
    size_epochs: Annotated[tuple[PositiveInt32, ...], INCREASING] = ()
    """Epochs at which each of `sizes` ends."""
    flip_test: bool = False
    """Evaluate the mean of each test image's logits and those of its mirror image."""
    mixup: _MixingShape = 0.0
    """Mix each training image with another of its batch, in shares from Beta(this, this); 0 means off."""
    cutmix: _MixingShape = 0.0
    """Paste a box of another image of its batch into each, its area from Beta(this, this); 0 means off."""

    @property
    def mixes(self) -> bool:
        """Whether training images are mixed with each other."""
        return self.mixup > 0 or self.cutmix > 0

    def sizes_from(self, epoch: int) -> tuple[int, ...]:
        """Returns the sides that are still to come from an epoch on, in order; the last one is 0.

        >>> DataConfig(sizes=(4, 6), size_epochs=(1, 3)).sizes_from(1)
        (6, 0)
        """
        ends = zip(self.sizes, self.size_epochs, strict=True)
        return (*dict.fromkeys(size for size, end in ends if epoch < end), 0)

    def size_at(self, epoch: int) -> int:
        """Returns the side of the training images of an epoch, from 0; 0: their own.

        >>> [DataConfig(sizes=(4, 6), size_epochs=(1, 3)).size_at(epoch) for epoch in range(4)]
        [4, 6, 6, 0]
        """
        return self.sizes_from(epoch)[0]

    def check_rules(self) -> None:
        """Raises ValueError if options do not fit each other."""
        self._check_counts()
        self._check_sizes()
        self._check_shape()

    def _check_counts(self) -> None:
        counts = (self.num_classes, self.train_examples, self.test_examples)
        found = self.source in FROM_FILES and all(counts)
        if self.source != "synthetic" and any(counts) and not found:
            why = "only data.source=synthetic takes all three; leave them out"
            raise self.conflict("source", "num_classes", "train_examples", "test_examples", why=why)

    def _check_sizes(self) -> None:
        if len(self.sizes) != len(self.size_epochs):
            raise self.conflict("sizes", "size_epochs", why="each size needs the epoch at which it ends")

    def _check_shape(self) -> None:
        resized = self.source in ("images", "imagenet")
        if self.image_shape and not resized and self.source != "synthetic":
            why = "all images of this source have one shape; leave data.image_shape out"
            raise self.conflict("source", "image_shape", why=why)
        if resized and self.image_shape[2:] not in ((), (3,)):
            raise self.conflict("source", "image_shape", why="images in files have three channels; pass 3 as the last")
