"""What is in a folder of images, packed or not: whether all can be read, how many, how large, how bright."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from trjax.data.folders import Files, index_folder
from trjax.data.image_files import ImageFiles, ReportProgress
from trjax.data.images import open_image
from trjax.data.jpeg import BadImageError
from trjax.data.pack import in_order
from trjax.data.shards import Shard, Shards, find_fault, printable, read_index
from trjax.data.splits import find_splits, is_packed, open_split
from trjax.text import format_table


@dataclass(frozen=True)
class Damage:
    """What cannot be read.

    Attributes:
        name: of an image or a shard.
        reason: what is wrong with it.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{printable(self.name)}: {printable(self.reason)}"


@dataclass(frozen=True)
class Survey:
    """What some images are like.

    Attributes:
        heights: of each that can be read.
        widths: likewise.
        mean: of each channel of pixels in [0, 1]; every image counts the same, whatever its size.
        std: likewise.
        damaged: images that cannot be read.
    """

    heights: np.ndarray
    widths: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    damaged: tuple[Damage, ...]


def _splits(folder: Path) -> dict[str, Path]:
    """Returns the folders of the splits; the folder itself, if it is one."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    return {folder.name: folder} if is_packed(folder) else find_splits(folder) or {folder.name: folder}


@dataclass(frozen=True)
class Verified:
    """What is wrong with a split.

    Attributes:
        examples: images that are to be there.
        shards: of them that are damaged.
        images: that are damaged, as far as their shards are there.
        left_out: images that were not packed, since they were damaged then.
    """

    examples: int
    shards: tuple[Damage, ...]
    images: tuple[Damage, ...]
    left_out: int = 0


def _check(images: ImageFiles, index: int) -> Damage | None:
    """Reads and decodes an image, and returns what is wrong with it."""
    try:
        data, label = images.read(index)
        if not 0 <= label < len(images.classes):
            raise BadImageError(f"its label is {label}, of {len(images.classes)} classes")
        open_image(data).decode()
    except (BadImageError, OSError) as error:
        return Damage(images.name(index), str(error))
    return None


def _check_shard(folder: Path, shard: Shard) -> str:
    """Returns what is wrong with a shard's file; nothing: ""."""
    if fault := find_fault(folder, shard):
        return fault
    with (folder / shard.file).open("rb") as file:
        changed = hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256
    return "its bytes have changed since it was packed (SHA-256)" if changed else ""


def verify_split(folder: Path, workers: int, report: ReportProgress = lambda *_: None) -> Verified:
    """Reads all images of a split, and returns what is damaged.

    Raises:
        ValueError: the folder holds no images, or no complete pack of them.
        OSError: a folder cannot be read.
    """
    images: ImageFiles
    shards: tuple[Shard, ...] = ()
    faults = {}
    if is_packed(folder):
        index = read_index(folder)
        shards = index.shards
        faults = {shard: fault for shard in shards if (fault := _check_shard(folder, shard))}
        images = Shards(folder, index.classes, tuple(shard for shard in shards if not find_fault(folder, shard)))
    else:
        images = index_folder(folder)
    damaged = []
    for done, found in enumerate(in_order(partial(_check, images), range(len(images)), workers), start=1):
        report(folder.name, done, len(images))
        if found is not None:
            damaged.append(found)
    return Verified(
        sum(shard.records for shard in shards) or len(images),
        tuple(Damage(shard.file, fault) for shard, fault in faults.items()),
        tuple(damaged),
        sum(len(shard.left_out) for shard in shards),
    )


def verify(folder: Path, workers: int, report: ReportProgress = lambda *_: None) -> tuple[str, bool]:
    """Reads all images of a folder, and returns a line for each that is damaged, a summary, and whether all is well.

    Raises:
        ValueError: see `verify_split`.
        OSError: likewise.
    """
    lines, sound = [], True
    for name, path in _splits(folder).items():
        found = verify_split(path, workers, report)
        lines += [f"{name}: {each}" for each in (*found.shards, *found.images)]
        shards = f"{len(found.shards)} shards and " if is_packed(path) else ""
        left_out = f"; {found.left_out:,} were left out when it was packed" if found.left_out else ""
        lines.append(f"{name}: {found.examples:,} images; {shards}{len(found.images)} images damaged{left_out}")
        sound &= not (found.shards or found.images)
    return "\n".join(lines), sound


def _measure(images: ImageFiles, index: int) -> Damage | tuple[int, int, np.ndarray, np.ndarray]:
    """Returns an image's height and width, and the mean and the mean square of each channel."""
    try:
        pixels = open_image(images.read(index).data).decode()
    except (BadImageError, OSError) as error:
        return Damage(images.name(index), str(error))
    mean, std = (value[:, 0] / 255 for value in cv2.meanStdDev(pixels))
    return *pixels.shape[:2], mean, std**2 + mean**2


def survey(
    images: ImageFiles, most: int, workers: int, report: ReportProgress = lambda *_: None, split: str = ""
) -> Survey:
    """Returns what images are like, from some of them.

    Args:
        images: to look at.
        most: to look at, at most; they lie evenly spread.
        workers: threads.
        report: is told how many are done.
        split: what they are called there.
    """
    count = min(most, len(images))
    indices = [len(images) * number // count for number in range(count)]
    found, damaged = [], []
    for done, one in enumerate(in_order(partial(_measure, images), indices, workers), start=1):
        report(split, done, count)
        if isinstance(one, Damage):
            damaged.append(one)
        else:
            found.append(one)
    if not found:
        return Survey(np.empty(0), np.empty(0), np.full(3, np.nan), np.full(3, np.nan), tuple(damaged))
    heights, widths, means, squares = (np.array(values) for values in zip(*found, strict=True))
    mean = means.mean(0)
    std = np.sqrt(np.maximum(squares.mean(0) - mean**2, 0))
    return Survey(heights, widths, mean, std, tuple(damaged))


def _count_classes(folder: Path, images: ImageFiles) -> np.ndarray:
    """Returns the number of images of each class."""
    if isinstance(images, Files):
        return np.bincount(images.labels, minlength=len(images.classes))
    return np.array(read_index(folder).class_examples)


def _spread(name: str, values: np.ndarray) -> list[Any]:
    if not len(values):
        return [name, "", "", ""]
    return [name, *(f"{value:g}" for value in (values.min(), np.median(values), values.max()))]


def _format(name: str, images: ImageFiles, counts: np.ndarray, found: Survey) -> Sequence[str]:
    """Returns the lines on one split."""
    looked_at = len(found.heights) + len(found.damaged)
    rows = [
        _spread("images of a class", counts),
        _spread("width", found.widths),
        _spread("height", found.heights),
    ]
    lines = [f"{name}: {len(images):,} images of {len(counts):,} classes; {looked_at:,} of them looked at"]
    lines += format_table(["", "min", "median", "max"], rows).splitlines()
    for what, values in (("mean", found.mean), ("std", found.std)):
        lines.append(f"{what} of red, green, blue in [0, 1]: {', '.join(f'{value:.4f}' for value in values)}")
    lines.append(f"{len(found.damaged)} damaged" + (":" if found.damaged else ""))
    return lines + [f"  {each}" for each in found.damaged]


def describe_folder(folder: Path, most: int, workers: int, report: ReportProgress = lambda *_: None) -> str:
    """Returns how many images there are, and what `survey` finds in some of them, for each split of a folder.

    Raises:
        ValueError: the folder holds no images, or no complete pack of them.
        OSError: a folder cannot be read.
    """
    if most < 1:
        raise ValueError(f"most={most}: must be positive")
    parts = []
    for name, path in _splits(folder).items():
        images = open_split(path)
        found = survey(images, most, workers, report, name)
        parts.append("\n".join(_format(name, images, _count_classes(path, images), found)))
    return "\n\n".join(parts)
