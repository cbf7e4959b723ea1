"""Folders of images: which files there are, in an order of their own, found once and remembered."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from trjax.data.image_files import Encoded
from trjax.files import atomic_write

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""Of files that are taken for images, in small or large letters; all others are passed over."""
VAL_SYNSETS = ("val_synsets.txt", "imagenet_2012_validation_synset_labels.txt")
"""Beside a flat `val`: the class of each of its files, a line each, in the order of their names."""
_FORMAT = 1


@dataclass(frozen=True)
class Files:
    """The images of one split, by index.

    Attributes:
        root: folder that the names are relative to.
        classes: names, in the order of the labels.
        labels: int32, shape (files,).
        names: of all files, one behind the other, in UTF-8.
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
        with open(f"{self.root}{os.sep}{self.name(index)}", "rb", buffering=0) as file:
            return Encoded(file.readall(), int(self.labels[index]))


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


def _flat_labels(folder: Path, names: Sequence[str]) -> tuple[tuple[str, ...], list[int]] | None:
    """Returns the classes and labels of a folder without one for each class; None if no file tells them.

    Raises:
        ValueError: the file tells another number of them.
    """
    table = next((folder.parent / name for name in VAL_SYNSETS if (folder.parent / name).is_file()), None)
    if table is None:
        return None
    lines = [line.split()[-1] for line in table.read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(lines) != len(names):
        raise ValueError(f"{table} names {len(lines)} classes, and {folder} holds {len(names)} images")
    classes = tuple(sorted(set(lines)))
    labels = {name: label for label, name in enumerate(classes)}
    return classes, [labels[name] for name in lines]


def find_files(folder: Path, seen: dict[str, int] | None = None) -> Files:
    """Returns the images of a split: those of each class in a folder that has its name, by name.

    Args:
        folder: of the split.
        seen: takes the time of change of every folder that was walked.

    Raises:
        ValueError: there is none, or nothing tells their classes.
        OSError: a folder cannot be read.
    """
    seen = {} if seen is None else seen
    prefix = len(str(folder)) + 1
    names = [path[prefix:] for path in _walk(str(folder), frozenset(), seen)]
    if not names:
        raise ValueError(f"{folder} holds no images; expected {folder}/CLASS/*.JPEG, or files that end in {SUFFIXES}")
    with os.scandir(folder) as found:
        folders = sorted(entry.name for entry in found if entry.is_dir() and not entry.name.startswith("."))
    if any(os.sep not in name for name in names):
        told = None if folders else _flat_labels(folder, names)
        if told is None:
            raise ValueError(
                f"{folder} holds images outside of its classes' folders, {next(n for n in names if os.sep not in n)} "
                f"for one; put them into {folder}/CLASS/, or their classes into {folder.parent / VAL_SYNSETS[0]}"
            )
        classes, labels = told
    else:
        classes = tuple(folders)
        by_name = {name: label for label, name in enumerate(classes)}
        labels = [by_name[name.partition(os.sep)[0]] for name in names]
    encoded = [os.fsencode(name) for name in names]
    ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    return Files(folder, classes, np.array(labels, np.int32), b"".join(encoded), ends)


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
            if about["format"] != _FORMAT:
                return None
            for walked, time in about["seen"].items():
                if os.stat(walked).st_mtime_ns != time:
                    return None
            return Files(folder, tuple(about["classes"]), saved["labels"], saved["names"].tobytes(), saved["ends"])
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


def index_folder(folder: Path) -> Files:
    """Returns `find_files`, from what was found the last time if no folder has changed since.

    It is remembered below `XDG_CACHE_HOME`, or `~/.cache`.

    Raises:
        ValueError: see `find_files`.
        OSError: likewise.
    """
    folder = folder.resolve()
    path = _cache_path(folder)
    if (files := _read_cache(path, folder)) is not None:
        return files
    seen: dict[str, int] = {}
    files = find_files(folder, seen)
    _write_cache(path, files, seen)
    return files
