"""Examples in one file of arrays, as `numpy.savez` writes it."""

from functools import lru_cache
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from trjax.data.spec import DataSpec

Arrays = tuple[np.ndarray, np.ndarray]
"""Images, uint8, shape (examples, height, width, channels), and labels, int32."""


def _check(root: str, split: str, images: np.ndarray, labels: np.ndarray) -> Arrays:
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


@lru_cache(maxsize=1)
def _load(root: str, stamp: tuple[int, ...]) -> tuple[DataSpec, Arrays, Arrays]:
    """Reads a file; `stamp` changes with it."""
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
    pixels = train[0].reshape(-1, train[0].shape[-1]) / 255
    num_classes = int(max(train[1].max(), test[1].max())) + 1
    height, width, channels = train[0].shape[1:]
    mean, std = (tuple(float(f"{value:.4g}") for value in of(pixels, axis=0)) for of in (np.mean, np.std))
    spec = DataSpec((height, width, channels), num_classes, len(train[1]), len(test[1]), mean, std)
    return spec, train, test


def load_npz(root: str) -> tuple[DataSpec, Arrays, Arrays]:
    """Returns the shapes and sizes of a file, and its training and test examples; cached until the file changes.

    Raises:
        ValueError: it is missing or damaged, or its arrays are not what they should be.
    """
    try:
        found = Path(root).stat()
    except OSError as error:
        raise ValueError(f"data.root={root} is no file of arrays: {error}") from error
    return _load(root, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))
