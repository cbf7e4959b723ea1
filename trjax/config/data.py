"""Options of the data."""

import math
from dataclasses import dataclass
from typing import Literal

from trjax.config.checks import FORBID, INT_LIMIT, check_values, require

FROM_FILES = ("imagenet", "images", "npz")
"""Sources whose classes and sizes are those of the files below their root."""


@dataclass(frozen=True)
class DataConfig:
    """Where examples come from and how they are varied."""

    __pydantic_config__ = FORBID

    source: Literal["digits", "cifar10", "cifar100", "imagenet", "images", "npz", "synthetic"] = "digits"
    """Digits are in the package; images are pictures in folders train/CLASS and val/CLASS, or packed; imagenet is such
    a folder too; npz is a file of arrays; synthetic is noise that depends on the class."""
    root: str = ""
    """Folder that holds the archives or extracted files (CIFAR), or the pictures; npz: the file, with train_images,
    train_labels, test_images, test_labels."""
    image_shape: tuple[int, ...] = ()
    """Height, width, channels; of pictures and synthetic, where empty means 224 224 3 and 32 32 3."""
    num_classes: int = 0
    """Synthetic, where 0 means 10; of files: what was found in them, which a run writes down."""
    train_examples: int = 0
    """Likewise; 0 means 2048."""
    test_examples: int = 0
    """Likewise; 0 means 512."""
    on_error: Literal["skip", "stop"] = "skip"
    """What becomes of a picture that cannot be read: it is named and counts for nothing, or the run stops."""
    workers: int = 0
    """Threads that read pictures ahead; 0: as many as this process may use cores, 16 at most."""
    least_area: float = 0.08
    """Smallest share of a picture that a random crop shows."""
    crop_padding: int = 0
    """Random crop after padding every side with this many zero pixels."""
    flip: bool = False
    """Mirror half of the training images, left to right."""
    trivial_augment: bool = False
    """Do one operation of TrivialAugment, at one strength, to each training image."""
    sizes: tuple[int, ...] = ()
    """Sides to which training images are resized, one after the other, before they come in their own."""
    size_epochs: tuple[int, ...] = ()
    """Epochs at which each of `sizes` ends."""
    flip_test: bool = False
    """Evaluate the mean of each test image's logits and those of its mirror image."""
    mixup: float = 0.0
    """Mix each training image with another of its batch, in shares from Beta(this, this); 0 means off."""
    cutmix: float = 0.0
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

    def __post_init__(self) -> None:
        check_values(self, "data.")
        found = (self.num_classes, self.train_examples, self.test_examples)
        require(
            self.source in ("synthetic", *FROM_FILES) or not any(found),
            f"data.source={self.source} with data.num_classes, data.train_examples or data.test_examples",
            "these belong to data.source=synthetic",
        )
        require(
            self.source == "synthetic" or all(found) or not any(found),
            f"data.source={self.source} with data.num_classes={found[0]}, data.train_examples={found[1]} and "
            f"data.test_examples={found[2]}",
            "leave all three out: they are what is found",
        )
        require(0 < self.least_area <= 1, f"data.least_area={self.least_area}", "must be in (0, 1]")
        for option in ("num_classes", "train_examples", "test_examples", "crop_padding", "workers"):
            require(getattr(self, option) >= 0, f"data.{option}={getattr(self, option)}", "must not be negative")
        require(
            len(self.sizes) == len(self.size_epochs) and all(0 < size <= 4096 for size in self.sizes),
            f"data.sizes={self.sizes} with data.size_epochs={self.size_epochs}",
            "each size, from 1 to 4096, needs the epoch at which it ends",
        )
        require(
            list(self.size_epochs) == sorted(set(self.size_epochs)) and min(self.size_epochs, default=1) > 0,
            f"data.size_epochs={self.size_epochs}",
            "must increase, and be positive",
        )
        for option in ("mixup", "cutmix"):
            value = getattr(self, option)
            require(value == 0 or 1e-3 <= value <= 1e3, f"data.{option}={value}", "must be from 0.001 to 1000, or 0")
        require(
            self.source in ("synthetic", "imagenet", "images") or not self.image_shape,
            f"data.source={self.source} with data.image_shape={self.image_shape}",
            "its images have one shape; leave data.image_shape out",
        )
        shape = self.image_shape
        require(
            not shape or (len(shape) == 3 and min(shape) > 0 and math.prod(shape) < INT_LIMIT),
            f"data.image_shape={shape}",
            "must be height, width, channels, all positive, less than 2^31 bytes in all",
        )
        require(
            self.source not in ("images", "imagenet") or shape[2:] in ((), (3,)),
            f"data.source={self.source} with data.image_shape={shape}",
            "pictures have three channels",
        )
