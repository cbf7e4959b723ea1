"""CIFAR-10 and CIFAR-100 from the standard archives or their extracted folders, python or binary version.

An archive is read to its end, where gzip has a checksum: a bit that flipped in what it holds is found. An extracted
folder has none: what is found there are files of another size or form, and labels out of range, not a changed pixel.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, and its download page.
"""

import gzip
import io
import pickle
import pickletools
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trjax.data.arrays import Arrays
from trjax.text import describe_error

Read = Callable[[str, int], bytes]
"""Maps a file's name and the most bytes to read of it to its content."""

HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
"""The page of both sets, in whose folder the archives are."""
_PIXELS = 32 * 32 * 3
_GZIP_START = b"\x1f\x8b"
_AROUND_BYTES = 2**20  # of an archive: headers, readme, names of the classes; they take 50 kB


@dataclass(frozen=True)
class _Layout:
    """One published version of a set: folder, archive, files with their example counts, label position."""

    folder: str
    archive: str
    train: tuple[tuple[str, int], ...]
    test: tuple[tuple[str, int], ...]
    num_classes: int
    label_key: bytes = b""
    label_bytes: int = 0  # binary version only: labels before the pixels; the last one is the fine label


_BATCHES = tuple((f"data_batch_{i}", 10_000) for i in range(1, 6))
_LAYOUTS = {
    "cifar10": (
        _Layout("cifar-10-batches-py", "cifar-10-python.tar.gz", _BATCHES, (("test_batch", 10_000),), 10, b"labels"),
        _Layout("cifar-10-batches-bin", "cifar-10-binary.tar.gz", tuple((f"{name}.bin", n) for name, n in _BATCHES),
                (("test_batch.bin", 10_000),), 10, label_bytes=1),
    ),
    "cifar100": (
        _Layout("cifar-100-python", "cifar-100-python.tar.gz", (("train", 50_000),), (("test", 10_000),), 100,
                b"fine_labels"),
        _Layout("cifar-100-binary", "cifar-100-binary.tar.gz", (("train.bin", 50_000),), (("test.bin", 10_000),), 100,
                label_bytes=2),
    ),
}  # fmt: skip


class _Array:
    """Stands for numpy's array, and its dtype, while a pickle is read: keeps its arguments, and allocates nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def read(self) -> np.ndarray:
        """Returns the array of bytes that it is, or raises nearly anything."""
        _, shape, dtype, column_major, content = self.state
        if dtype.arguments[0] not in ("u1", b"u1"):
            raise ValueError(f"an array is of {dtype.arguments[0]!r}, not of bytes")
        return np.frombuffer(content, np.uint8).reshape(shape, order="F" if column_major else "C")


class _ArraysOnly(pickle.Unpickler):
    """Unpickles what CIFAR's files hold, arrays and plain containers, and refuses to run anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns what stands for numpy's array constructors, and nothing else."""
        module = module.replace("numpy.core", "numpy._core")  # its name when the files were made, and now
        if (module, name) in {("numpy._core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}:
            return _Array
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2, in Latin-1
            return lambda text, _: text.encode("latin1")
        raise pickle.UnpicklingError(f"it names {module!r}.{name!r}, which CIFAR's files do not")


def _unpickle(content: bytes) -> Any:
    """Returns what a pickle holds, in memory that its own size bounds."""
    for opcode, argument, _ in pickletools.genops(content):
        # Python makes a table of as many entries as the highest number.
        if opcode.name in ("PUT", "LONG_BINPUT") and (argument or 0) > len(content):
            raise pickle.UnpicklingError(f"it numbers an object {argument}")
    return _ArraysOnly(io.BytesIO(content), encoding="bytes").load()


def _decode(content: bytes, layout: _Layout) -> Arrays:
    """Returns pixels, shape (examples, 3072), and labels of one file."""
    if layout.label_bytes:
        record = layout.label_bytes + _PIXELS
        if len(content) % record:
            raise ValueError(f"{len(content)} bytes are not a whole number of {record}-byte records")
        rows = np.frombuffer(content, np.uint8).reshape(-1, record)
        return rows[:, layout.label_bytes :], rows[:, layout.label_bytes - 1]
    batch = _unpickle(content)
    labels = batch[layout.label_key]
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise ValueError("its labels are not a list of integers")
    return batch[b"data"].read(), np.array(labels)


def _most_bytes(num_examples: int, layout: _Layout) -> int:
    """Returns the most that a file holds; pickled, pixels may take two bytes each, and every image has a name."""
    return num_examples * (layout.label_bytes + _PIXELS if layout.label_bytes else 2 * _PIXELS + 256) + 4096


def _read_file(name: str, num_examples: int, layout: _Layout, read: Read, where: str) -> Arrays:
    """Returns the images, shape (examples, 32, 32, 3) uint8, and int32 labels of one file, checked."""
    expected = f"expected {num_examples} examples of 3072 bytes; get {layout.archive} again from {HOME}"
    most = _most_bytes(num_examples, layout)
    try:
        content = read(name, most + 1)
    except (OSError, KeyError, tarfile.TarError) as error:
        raise ValueError(f"{where}: {name} is missing or unreadable ({describe_error(error)}); {expected}") from None
    try:
        if len(content) > most:
            raise ValueError(f"it holds more than {most} bytes")
        pixels, labels = _decode(content, layout)
        if pixels.shape != (num_examples, _PIXELS) or labels.shape != (num_examples,):
            raise ValueError(f"it holds pixels of shape {pixels.shape} and {len(labels)} labels")
        if labels.min() < 0 or labels.max() >= layout.num_classes:
            raise ValueError(f"labels are not all in 0-{layout.num_classes - 1}")
    except Exception as error:  # damaged pickles raise nearly anything
        raise ValueError(f"{where}: {name} is damaged ({describe_error(error)}); {expected}") from error
    images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels.astype(np.int32)


def _read_layout(layout: _Layout, read: Read, where: str) -> tuple[Arrays, Arrays]:
    def joined(files: tuple[tuple[str, int], ...]) -> Arrays:
        images, labels = zip(*(_read_file(name, count, layout, read, where) for name, count in files), strict=True)
        return np.concatenate(images), np.concatenate(labels)

    return joined(layout.train), joined(layout.test)


def _read_from(folder: Path, name: str, limit_bytes: int) -> bytes:
    if (folder / name).exists() and not (folder / name).is_file():
        raise KeyError("not a regular file")  # opening a pipe would wait for ever
    with (folder / name).open("rb") as file:
        return file.read(limit_bytes)


def _unpack(layout: _Layout, path: Path) -> tarfile.TarFile:
    """Returns the archive, all of it read into memory and its checksum found right; damage raises nearly anything."""
    if not path.is_file():
        raise ValueError("not a regular file")
    most = sum(_most_bytes(count, layout) for _, count in layout.train + layout.test) + _AROUND_BYTES
    with path.open("rb") as file:
        packed = file.read(len(_GZIP_START)) == _GZIP_START  # some browsers unpack what they fetch
    with gzip.open(path) if packed else path.open("rb") as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it holds more than {most} bytes")
    archive = tarfile.TarFile(fileobj=io.BytesIO(content))
    for member in archive:
        if member.size < 0:  # the next one would lie before it, and so on for ever
            raise ValueError(f"a member of {member.size} bytes")
    return archive


def _read_archive(layout: _Layout, path: Path) -> tuple[Arrays, Arrays]:
    def read(name: str, limit_bytes: int) -> bytes:
        member = archive.getmember(f"{layout.folder}/{name}")
        file = archive.extractfile(member) if member.isreg() else None  # no link to another member, either
        if file is None:
            raise KeyError("not a regular file")
        return file.read(limit_bytes)

    try:
        archive = _unpack(layout, path)
    except Exception as error:
        raise ValueError(
            f"{path} is damaged ({describe_error(error)}); get {layout.archive} again from {HOME}"
        ) from error
    # Only named members are read, into memory: nothing in the archive decides what is written where.
    return _read_layout(layout, read, str(path))


def _find(layouts: tuple[_Layout, ...], folder: Path) -> tuple[_Layout, Path] | None:
    """Returns the first version that is there, and its folder or archive."""
    for layout in layouts:
        for candidate in (folder / layout.folder, folder):
            named = candidate.name == layout.folder and candidate.is_dir()
            if named or (candidate / layout.train[0][0]).is_file():
                return layout, candidate
        if (folder / layout.archive).exists():
            return layout, folder / layout.archive
    return None


def load_cifar(name: str, root: str) -> tuple[Arrays, Arrays]:
    """Returns training and test examples: uint8 images (n, 32, 32, 3) and int32 labels, fine ones for CIFAR-100.

    Looks in `root` for an extracted folder, then for its archive; `root` may be the extracted folder itself.

    Raises:
        ValueError: nothing is found, or a file is missing or damaged; says which, what was expected, and where
            to get it.
    """
    layouts = _LAYOUTS[name]
    wanted = ", ".join(f"{layout.folder}/ or {layout.archive}" for layout in layouts)
    if not root:
        raise ValueError(f"data.source={name} needs --data.root: a folder with {wanted}; get one from {HOME}")
    try:
        folder = Path(root).expanduser()
        problem = f"holds no {name}" if folder.is_dir() else "is not a folder"
        found = _find(layouts, folder)
    except (OSError, RuntimeError) as error:  # too long a name, no permission; no such home
        raise ValueError(
            f"data.root={root} cannot be used ({describe_error(error)}); expected a folder with {wanted}"
        ) from error
    if found is None:
        raise ValueError(f"data.root={root} {problem}; expected a folder with {wanted}; get one from {HOME}")
    layout, path = found
    if path.name == layout.archive:
        return _read_archive(layout, path)
    return _read_layout(layout, partial(_read_from, path), str(path))
