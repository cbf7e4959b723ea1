"""What is in a folder of images, packed or not: whether all can be read, how many, how large, how bright."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import cv2
import numpy as np

from trjax.data.folders import Files, find_splits, index_folder, is_packed, open_split
from trjax.data.image_files import ImageFiles, ReportProgress
from trjax.data.images import open_image
from trjax.data.jpeg import BadImageError
from trjax.data.pack import in_order
from trjax.data.shards import BadImage, Shards, find_fault, printable, read_index
from trjax.text import format_table

T = TypeVar("T")


def _splits(folder: Path) -> dict[str, Path]:
    """Returns the folders of the splits; the folder itself, if it is one."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    return {folder.name: folder} if is_packed(folder) else find_splits(folder) or {folder.name: folder}


def _read_one(images: ImageFiles, use: Callable[[np.ndarray], T], index: int) -> BadImage | T:
    """Decodes an image, and returns what `use` returns for its pixels."""
    try:
        data, label = images.read(index)
        if not 0 <= label < len(images.classes):
            raise BadImageError(f"its label is {label}, of {len(images.classes)} classes")
        return use(open_image(data).decode())
    except (BadImageError, OSError) as error:
        return BadImage(index, images.name(index), str(error))


def _read_each(
    images: ImageFiles, use: Callable[[np.ndarray], T], order: Sequence[int], workers: int, report: Callable[..., None]
) -> tuple[list[T], list[BadImage]]:
    """Returns the results of `use` for images, by index, and the images that cannot be read."""
    results, bad = [], []
    for done, found in enumerate(in_order(partial(_read_one, images, use), order, workers), start=1):
        report(done, len(order))
        if isinstance(found, BadImage):
            bad.append(found)
        else:
            results.append(found)
    return results, bad


def _verify_split(folder: Path, workers: int, report: ReportProgress) -> tuple[list[str], str]:
    """Reads all images of a split; returns a line for each damaged shard and image, and a summary."""
    if packed := is_packed(folder):
        index = read_index(folder)
        faults = {shard.file: fault for shard in index.shards if (fault := find_fault(folder, shard, read=True))}
        readable = tuple(shard for shard in index.shards if not find_fault(folder, shard))
        images: ImageFiles = Shards(folder, index.classes, readable)
        left_out = sum(len(shard.left_out) for shard in index.shards)
    else:
        images = index_folder(folder)
        faults, left_out = {}, 0
    _, bad = _read_each(images, np.size, range(len(images)), workers, partial(report, folder.name))
    summary = f"{index.examples if packed else len(images):,} images; "
    summary += (f"{len(faults)} shards and " if packed else "") + f"{len(bad)} images damaged"
    summary += f"; {left_out:,} were left out when it was packed" if left_out else ""
    return [f"{printable(file)}: {fault}" for file, fault in faults.items()] + [str(image) for image in bad], summary


def verify(folder: Path, workers: int, report: ReportProgress = lambda *_: None) -> tuple[str, bool]:
    """Reads all images of a folder; returns a line for each that is damaged, a summary, and whether none is.

    Raises:
        ValueError: the folder holds no images, or no complete pack of them.
        OSError: a folder cannot be read.
    """
    lines: list[str] = []
    sound = True
    for name, path in _splits(folder).items():
        damaged, summary = _verify_split(path, workers, report)
        lines += [f"{name}: {line}" for line in (*damaged, summary)]
        sound &= not damaged
    return "\n".join(lines), sound


def _measure(pixels: np.ndarray) -> tuple[int, int, np.ndarray, np.ndarray]:
    """Returns an image's height and width, and the mean and the mean square of each channel."""
    mean, std = (value[:, 0] / 255 for value in cv2.meanStdDev(pixels))
    return *pixels.shape[:2], mean, std**2 + mean**2


def _format_range(name: str, values: Sequence[int]) -> list[Any]:
    found = [f"{of(values):g}" for of in (np.min, np.median, np.max)] if len(values) else [""] * 3
    return [name, *found]


def _describe_split(name: str, folder: Path, most: int, workers: int, report: ReportProgress) -> str:
    """Returns the lines on one split; each image has the same weight in the means, whatever its size."""
    images = open_split(folder)
    if isinstance(images, Files):
        counts: Sequence[int] = np.bincount(images.labels, minlength=len(images.classes)).tolist()
    else:
        counts = read_index(folder).class_examples
    total = min(most, len(images))
    indices = [len(images) * number // total for number in range(total)]
    measured, bad = _read_each(images, _measure, indices, workers, partial(report, name))
    heights, widths, means, squares = zip(*measured, strict=True) if measured else ((), (), [np.full(3, np.nan)], [0.0])
    mean = np.mean(means, axis=0)
    std = np.sqrt(np.maximum(np.mean(squares, axis=0) - mean**2, 0))
    rows = [
        _format_range("images of a class", counts),
        _format_range("width", widths),
        _format_range("height", heights),
    ]
    return "\n".join(
        [
            f"{name}: {len(images):,} images of {len(counts):,} classes; {total:,} of them looked at",
            format_table(["", "min", "median", "max"], rows),
            *(
                f"{what} of red, green, blue in [0, 1]: {', '.join(f'{value:.4f}' for value in values)}"
                for what, values in (("mean", mean), ("std", std))
            ),
            f"{len(bad)} damaged" + (":" if bad else ""),
            *(f"  {image}" for image in bad),
        ]
    )


def describe_folder(folder: Path, most: int, workers: int, report: ReportProgress = lambda *_: None) -> str:
    """Returns how many images each split of a folder holds, and what some of them are like.

    Args:
        folder: of the splits, or one of them.
        most: images of a split to decode, at most; they are evenly spaced.
        workers: threads.
        report: is called with the progress.

    Raises:
        ValueError: the folder holds no images, or no complete pack of them.
        OSError: a folder cannot be read.
    """
    if most < 1:
        raise ValueError(f"most={most}: must be positive")
    return "\n\n".join(_describe_split(name, path, most, workers, report) for name, path in _splits(folder).items())
