"""Folders of images: their splits, packed or not; their files, in an order of their own, found once and cached."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from trjax.data.image_files import Encoded, ImageFiles
from trjax.data.shards import INDEX, UNFINISHED, open_shards
from trjax.files import atomic_write

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""Of files that are taken for images, in small or large letters; all others are skipped."""
VAL_SYNSETS = ("val_synsets.txt", "imagenet_2012_validation_synset_labels.txt")
"""Beside a flat `val`: the class of each of its files, a line each, in the order of their names."""
SPLIT_NAMES = (("train",), ("val", "test", "validation"))
"""What the folders of the training and of the test split may be called."""
SPLITS = tuple(name for names in SPLIT_NAMES for name in names)
"""All of them."""
_FORMAT = 1


@dataclass(frozen=True)
class Files:
    """The images of one split, by index.

    Attributes:
        root: folder that the names are relative to.
        classes: names, in the order of the labels.
        labels: int32, shape (files,).
        names: of all files, joined, in UTF-8.
        ends: where each name ends, int64, shape (files,).
    """

    root: Path
    classes: tuple[str, ...]
    labels: np.ndarray
    names: bytes
    ends: np.ndarray

    def __len__(self) -> int:
        """Returns the number of files."""
        return len(self.labels)

    def name(self, index: int) -> str:
        """Returns the name of a file, relative to the root."""
        start = int(self.ends[index - 1]) if index else 0
        return os.fsdecode(self.names[start : int(self.ends[index])])

    def read(self, index: int) -> Encoded:
        """Returns a file.

        Raises:
            OSError: it cannot be read.
        """
        return Encoded((self.root / self.name(index)).read_bytes(), int(self.labels[index]))


def _walk(folder: str, above: frozenset[str], seen: dict[str, int]) -> Iterator[str]:
    """Yields the images below a folder, in order; of links that lead back, nothing.

    Args:
        folder: to walk.
        above: folders that it lies in, by their real paths.
        seen: takes every folder's time of change.
    """
    real = os.path.realpath(folder)
    if real in above:
        return
    seen[folder] = os.stat(folder).st_mtime_ns
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _walk(entry.path, above | {real}, seen)
        elif entry.name.lower().endswith(SUFFIXES):
            yield entry.path


def _read_flat_classes(folder: Path, names: Sequence[str]) -> list[str]:
    """Returns the class of each image in a folder without one for each class; none if there is no file of them.

    Raises:
        ValueError: the file names another number of them.
    """
    table = next((folder.parent / name for name in VAL_SYNSETS if (folder.parent / name).is_file()), None)
    if table is None:
        return []
    lines = [line.split()[-1] for line in table.read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(lines) != len(names):
        raise ValueError(f"{table} names {len(lines)} classes, and {folder} holds {len(names)} images")
    return lines


def find_files(folder: Path) -> tuple[Files, dict[str, int]]:
    """Returns the images of a split, those of each class in a folder of its name, and the walked folders' change times.

    Raises:
        ValueError: there is no image, or nothing names their classes.
        OSError: a folder cannot be read.
    """
    seen: dict[str, int] = {}
    prefix = len(str(folder)) + 1
    names = [path[prefix:] for path in _walk(str(folder), frozenset(), seen)]
    if not names:
        raise ValueError(f"{folder} holds no images; expected {folder}/CLASS/*.JPEG, or files that end in {SUFFIXES}")
    folders = sorted(name for name in (path[prefix:] for path in seen) if name and os.sep not in name)
    class_names = [name.partition(os.sep)[0] for name in names]
    if flat := next((name for name in names if os.sep not in name), ""):
        class_names = [] if folders else _read_flat_classes(folder, names)
        folders = sorted(set(class_names))
        if not class_names:
            raise ValueError(
                f"{folder} holds images outside of its classes' folders, {flat} for one; "
                f"put them into {folder}/CLASS/, or their classes into {folder.parent / VAL_SYNSETS[0]}"
            )
    labels = {name: label for label, name in enumerate(folders)}
    encoded = [os.fsencode(name) for name in names]
    ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    classes = np.array([labels[name] for name in class_names], np.int32)
    return Files(folder, tuple(folders), classes, b"".join(encoded), ends), seen


def _cache_path(folder: Path) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "trjax" / f"index-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}.npz"


def _write_cache(path: Path, files: Files, seen: dict[str, int]) -> None:
    """Caches the index; if the cache cannot be written, the next start lists the folder again."""
    about = json.dumps({"format": _FORMAT, "classes": files.classes, "seen": seen}).encode()
    about_bytes, names = np.frombuffer(about, np.uint8), np.frombuffer(files.names, np.uint8)
    own = path.with_name(f"{path.name}.{os.getpid()}")  # several processes may start at once
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, partial=own), own.open("wb") as file:
            np.savez(file, about=about_bytes, labels=files.labels, ends=files.ends, names=names)


def _read_cache(path: Path, folder: Path) -> Files | None:
    """Returns what was found before, unless a folder has changed since."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
            about = json.loads(saved["about"].tobytes())
            same = about["format"] == _FORMAT and all(os.stat(at).st_mtime_ns == ns for at, ns in about["seen"].items())
            files = Files(folder, tuple(about["classes"]), saved["labels"], saved["names"].tobytes(), saved["ends"])
            return files if same else None
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


def index_folder(folder: Path) -> Files:
    """Returns the files that `find_files` finds, from the cache if no folder has changed since.

    It is cached below `XDG_CACHE_HOME`, or `~/.cache`.

    Raises:
        ValueError: see `find_files`.
        OSError: a folder cannot be read.
    """
    folder = folder.resolve()
    path = _cache_path(folder)
    if (files := _read_cache(path, folder)) is None:
        files, seen = find_files(folder)
        _write_cache(path, files, seen)
    return files


def find_splits(folder: Path) -> dict[str, Path]:
    """Returns the folders of the splits in a folder, by name; none if it is not made of splits."""
    return {name: folder / name for name in SPLITS if (folder / name).is_dir()}


def is_packed(folder: Path) -> bool:
    """Returns whether a folder is a packed split, complete or not."""
    return (folder / INDEX).exists() or (folder / UNFINISHED).exists() or any(folder.glob("*.array_record"))


def open_split(folder: Path) -> ImageFiles:
    """Returns the images of a split.

    Raises:
        ValueError: there are none, or what is packed is damaged.
    """
    try:
        return open_shards(folder) if is_packed(folder) else index_folder(folder)
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error}") from error


def open_splits(root: str) -> tuple[ImageFiles, ImageFiles]:
    """Returns the images of the training and of the test split.

    Raises:
        ValueError: one is missing or damaged, or they have other classes.
    """
    if not root:
        raise ValueError("data.root='': must be the folder of the images; pass --data.root")
    splits = []
    for names in SPLIT_NAMES:
        found = next((path for name, path in find_splits(Path(root)).items() if name in names), None)
        if found is None:
            expected = " or ".join(f"{Path(root, name)}/CLASS/*.JPEG" for name in names)
            raise ValueError(f"data.root={root}: expected {expected}, or what `python -m trjax.data pack` makes of it")
        splits.append(open_split(found))
    train, test = splits
    if train.classes != test.classes:
        apart = sorted(set(train.classes) ^ set(test.classes))
        raise ValueError(f"data.root={root}: {len(apart)} classes are in one split alone, {apart[0]} for one")
    return train, test
