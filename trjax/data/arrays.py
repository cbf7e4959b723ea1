"""Examples in one file of arrays, as `numpy.savez` writes it."""

from functools import lru_cache
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from trjax.config.data import DataConfig
from trjax.data.spec import DataSpec

Split = tuple[np.ndarray, np.ndarray]
"""Images, uint8, shape (examples, height, width, channels), and labels, int32."""


def _check(root: str, split: str, images: np.ndarray, labels: np.ndarray) -> Split:
    """Returns a split, or raises ValueError for arrays that are none."""
    if images.ndim == 3:
        images = images[..., None]
    if images.dtype != np.uint8 or images.ndim != 4 or not images.size:
        raise ValueError(
            f"data.root={root}: {split}_images is {images.dtype}{list(images.shape)}; "
            "must be uint8, examples x height x width x channels"
        )
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1] or labels.min() < 0:
        raise ValueError(
            f"data.root={root}: {split}_labels is {labels.dtype}{list(labels.shape)} for {len(images)} images; "
            "must be whole numbers from 0, one for each"
        )
    return images, labels.astype(np.int32)


def _stamp(root: str) -> tuple[int, ...]:
    """Returns what changes with a file."""
    try:
        found = Path(root).stat()
    except OSError as error:
        raise ValueError(f"data.root={root} is no file of arrays: {error}") from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=1)
def _load(root: str, stamp: tuple[int, ...]) -> tuple[Split, Split]:
    splits = []
    try:
        with Path(root).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            for split in ("train", "test"):
                splits.append(_check(root, split, file[f"{split}_images"], file[f"{split}_labels"]))
    except KeyError as error:
        raise ValueError(f"data.root={root}: it holds no array of this name: {error}") from error
    except (OSError, EOFError, BadZipFile, TypeError, AttributeError) as error:
        raise ValueError(f"data.root={root} is no file of arrays: {error}") from error
    train, test = splits
    if train[0].shape[1:] != test[0].shape[1:]:
        raise ValueError(f"data.root={root}: training images are {train[0].shape[1:]}, test images {test[0].shape[1:]}")
    return train, test


def load_npz(root: str) -> tuple[Split, Split]:
    """Returns the training and the test split of a file, which is read anew only if it has changed.

    Raises:
        ValueError: it is missing or damaged, or its arrays are not what they should be.
    """
    return _load(root, _stamp(root))


@lru_cache(maxsize=1)
def _describe(root: str, stamp: tuple[int, ...]) -> DataSpec:
    train, test = _load(root, stamp)
    pixels = train[0].reshape(-1, train[0].shape[-1]) / 255
    num_classes = int(max(train[1].max(), test[1].max())) + 1
    height, width, channels = train[0].shape[1:]
    mean, std = (tuple(float(f"{value:.4g}") for value in of(pixels, axis=0)) for of in (np.mean, np.std))
    return DataSpec((height, width, channels), num_classes, len(train[1]), len(test[1]), mean, std)


def describe_npz(data: DataConfig) -> DataSpec:
    """Returns the shapes and sizes of a file, and what its training pixels are like.

    Raises:
        ValueError: see `load_npz`.
    """
    return _describe(data.root, _stamp(data.root))
