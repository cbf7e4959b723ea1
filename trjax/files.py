"""Files that are complete or absent: written under another name, then renamed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def partial_path(path: Path) -> Path:
    """Returns the name that a file has until it is complete.

    >>> partial_path(Path("run/20.safetensors")).name
    '20.safetensors.partial'
    """
    return path.with_name(f"{path.name}.partial")


def sync(path: Path) -> None:
    """Waits until the contents of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_write(path: Path, durable: bool = False, partial: Path | None = None) -> Iterator[Path]:
    """Yields the path to write to; after the block, that file replaces `path`.

    If the block fails, trjax removes the unfinished file, and `path` stays as it was. A killed process leaves the
    unfinished file behind.

    Args:
        path: the file.
        durable: sync the contents before the rename, so that a power cut cannot leave a name without them.
        partial: where to write; default: `partial_path(path)`.

    Raises:
        OSError: the file cannot be synced or renamed.
    """
    partial = partial or partial_path(path)
    try:
        yield partial
        if durable:
            sync(partial)
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
