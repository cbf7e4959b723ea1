"""CIFAR-10 and CIFAR-100 from the standard archives or their extracted folders, python or binary version.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, and its download page.
"""

import io
import pickle
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

Examples = tuple[np.ndarray, np.ndarray]

_HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
_PIXELS = 32 * 32 * 3


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


class _ArraysOnly(pickle.Unpickler):
    """Unpickles what CIFAR's files hold, arrays and plain containers, and refuses to run anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns numpy's array constructors only."""
        module = module.replace("numpy.core", "numpy._core")  # its name when the files were made, and now
        arrays = {("numpy._core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}
        if (module, name) in arrays | {("_codecs", "encode")}:  # the last is how Python 3 writes bytes for Python 2
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which CIFAR's files do not")


def _decode(content: bytes, layout: _Layout) -> Examples:
    """Returns pixels, shape (examples, 3072), and labels of one file."""
    if layout.label_bytes:
        record = layout.label_bytes + _PIXELS
        if len(content) % record:
            raise ValueError(f"{len(content)} bytes are not a whole number of {record}-byte records")
        rows = np.frombuffer(content, np.uint8).reshape(-1, record)
        return rows[:, layout.label_bytes :], rows[:, layout.label_bytes - 1]
    batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    return np.asarray(batch[b"data"]), np.asarray(batch[layout.label_key])


def _read_file(name: str, num_examples: int, layout: _Layout, read: Callable[[str], bytes], where: str) -> Examples:
    """Returns the images, shape (examples, 32, 32, 3) uint8, and int32 labels of one file, checked."""
    expected = f"expected {num_examples} examples of 3072 bytes; get {layout.archive} again from {_HOME}"
    try:
        content = read(name)
    except (OSError, KeyError, EOFError, tarfile.TarError) as error:
        raise ValueError(f"{where}: {name} is missing or unreadable ({error}); {expected}") from None
    try:
        pixels, labels = _decode(content, layout)
        if pixels.shape != (num_examples, _PIXELS) or pixels.dtype != np.uint8 or labels.shape != (num_examples,):
            raise ValueError(f"it holds {pixels.shape} {pixels.dtype} and {labels.shape} labels")
        if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= layout.num_classes:
            raise ValueError(f"labels are not integers in 0-{layout.num_classes - 1}")
    except Exception as error:  # damaged pickles raise nearly anything
        raise ValueError(f"{where}: {name} is damaged ({error}); {expected}") from error
    images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels.astype(np.int32)


def _read_layout(layout: _Layout, read: Callable[[str], bytes], where: str) -> tuple[Examples, Examples]:
    def joined(files: tuple[tuple[str, int], ...]) -> Examples:
        parts = [_read_file(name, count, layout, read, where) for name, count in files]
        return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])

    return joined(layout.train), joined(layout.test)


def _read_from(folder: Path, name: str) -> bytes:
    return (folder / name).read_bytes()


def _read_archive(layout: _Layout, path: Path) -> tuple[Examples, Examples]:
    def read(name: str) -> bytes:
        member = archive.extractfile(f"{layout.folder}/{name}")
        if member is None:
            raise KeyError("not a regular file")
        return member.read()

    try:
        with tarfile.open(path) as archive:
            # Only named members are read, into memory: nothing in the archive decides what is written where.
            return _read_layout(layout, read, str(path))
    except (OSError, EOFError, tarfile.TarError) as error:
        raise ValueError(f"{path} is damaged ({error}); get {layout.archive} again from {_HOME}") from error


def load_cifar(name: str, root: str) -> tuple[Examples, Examples]:
    """Returns training and test examples: uint8 images (n, 32, 32, 3) and int32 labels, fine ones for CIFAR-100.

    Looks in `root` for an extracted folder, then for its archive; `root` may be the extracted folder itself.

    Raises:
        ValueError: nothing is found, or a file is missing or damaged; says which, what was expected, and where
            to get it.
    """
    layouts = _LAYOUTS[name]
    wanted = ", ".join(f"{layout.folder}/ or {layout.archive}" for layout in layouts)
    if not root:
        raise ValueError(f"data.source={name} needs --data.root: a folder with {wanted}; get one from {_HOME}")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise ValueError(f"data.root={root} is not a folder; expected one with {wanted}; get one from {_HOME}")
    for layout in layouts:
        for candidate in (folder / layout.folder, folder):
            named = candidate.name == layout.folder and candidate.is_dir()
            if named or (candidate / layout.train[0][0]).is_file():
                return _read_layout(layout, partial(_read_from, candidate), str(candidate))
        if (folder / layout.archive).exists():
            return _read_archive(layout, folder / layout.archive)
    raise ValueError(f"data.root={root} holds no {name}; expected {wanted}; get one from {_HOME}")
