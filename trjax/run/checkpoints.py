"""State to disk and back, atomically, at any world size: the last two and the best of a run.

A checkpoint is one safetensors file named by its step, with its SHA-256 beside it as `sha256sum` writes it: what is
there under its name and has that digest is whole. It is written while training goes on, by one process.
"""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from trjax.files import atomic_write, partial_path, sync
from trjax.step.state import TrainState

_METADATA_KEY = "trjax"


@dataclass(frozen=True)
class CheckpointInfo:
    """The metadata of a checkpoint.

    Attributes:
        step: batches seen.
        position: epoch and batch of the next step.
        config: the run's configuration as plain types.
        test_top1: at this step; None if it was not evaluated.
        score: decides which checkpoint is the best, the larger the better; None if it was not evaluated.
    """

    step: int
    position: dict[str, int]
    config: dict[str, Any]
    test_top1: float | None
    score: float | None = None


def _names(state: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)]


def encode(state: TrainState, info: CheckpointInfo) -> bytes:
    """Returns a checkpoint's bytes: safetensors with the state's arrays by path, and `info` among its metadata."""
    arrays = {name: np.asarray(leaf) for name, leaf in _names(state)}
    return safetensors.save(arrays, {_METADATA_KEY: json.dumps(vars(info))})


def _read_info(data: bytes) -> CheckpointInfo:
    """Returns the metadata in a checkpoint's header, which begins with its own length.

    Raises:
        ValueError: there is none, or of another version.
    """
    length = int.from_bytes(data[:8], "little")
    try:
        info = CheckpointInfo(**json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_METADATA_KEY]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("it is no checkpoint of trjax") from error
    if type(info.step) is not int or not isinstance(info.position, dict) or set(info.position) != {"epoch", "batch"}:
        raise ValueError("it is no checkpoint of this version")
    return info


def decode(data: bytes, shapes: TrainState, where: str) -> TrainState:
    """Returns the state in a checkpoint's bytes, arrays of the host.

    Args:
        data: from `encode`.
        shapes: of the state that is wanted.
        where: names it in an error.

    Raises:
        ValueError: it is of another model; lists what differs.
    """
    try:
        arrays = safetensors.load(data)
    except SafetensorError as error:
        raise ValueError(f"{where} is no checkpoint: {error}") from error
    wanted = dict(_names(shapes))
    differing = [f"{name} is missing" for name in wanted if name not in arrays]
    differing += [f"{name} is not of this model" for name in arrays if name not in wanted]
    for name in wanted.keys() & arrays.keys():
        saved, expected = arrays[name], wanted[name]
        if (saved.shape, saved.dtype) != (expected.shape, expected.dtype):
            there, here = (f"{leaf.dtype}{list(leaf.shape)}" for leaf in (saved, expected))
            differing.append(f"{name} is {there} there and {here} here")
    if differing:
        more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise ValueError(f"{where} is of another model or optimizer: {'; '.join(sorted(differing)[:5])}{more}")
    return jax.tree.unflatten(jax.tree.structure(shapes), [arrays[name] for name in wanted])


def _digest_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _read_whole(path: Path) -> bytes:
    """Returns the bytes of a checkpoint.

    Raises:
        ValueError: they are not those that were written.
        OSError: they cannot be read.
    """
    digest = _digest_path(path)
    if not digest.exists():
        raise ValueError("its digest is missing")
    data = path.read_bytes()
    if digest.read_bytes() != _digest_line(data, path):
        raise ValueError("its digest is another: it is damaged")
    return data


def _digest_line(data: bytes, path: Path) -> bytes:
    return f"{hashlib.sha256(data).hexdigest()}  {path.name}\n".encode()


@jax.jit
def _copy(leaves: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(leaf) for leaf in leaves]


class Checkpoints:
    """The checkpoints of one run, in `folder`; damaged ones are skipped and stay as they are."""

    def __init__(self, folder: Path, warn: Callable[[str], None], keep: int = 2) -> None:
        """Opens (or creates) a run's checkpoints, and reads every one of them to its end.

        Args:
            folder: where they are.
            warn: is called with a message about each damaged one.
            keep: how many of the last ones; of two, should one be damaged, there is another.

        Raises:
            OSError: the folder cannot be used.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._keep = folder, keep
        self.found: dict[int, CheckpointInfo] = {}
        """Those that are whole, by step."""
        self.damaged: list[Path] = []
        """Those that are not."""
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        for path in sorted(folder.glob("*.safetensors"), key=lambda path: (len(path.stem), path.stem)):
            if not path.stem.isdigit():
                continue  # one that was moved aside
            try:
                info = _read_info(_read_whole(path))
                if info.step != int(path.stem):
                    raise ValueError(f"it is that of step {info.step}")
                self.found[info.step] = info
            except (ValueError, OSError) as error:
                self.damaged.append(path)
                warn(f"checkpoint {path} is skipped: {error}")
        for path in sorted(folder.glob("*.safetensors.partial")):
            warn(f"checkpoint {path} is skipped: it was not written to its end")

    @property
    def last(self) -> CheckpointInfo | None:
        """The last checkpoint."""
        return self.found[max(self.found)] if self.found else None

    @property
    def best(self) -> CheckpointInfo | None:
        """The one with the best score, the latest of equals."""
        scored = [info for info in self.found.values() if info.score is not None]
        return max(scored, key=lambda info: (info.score, info.step), default=None)

    def path(self, step: int) -> Path:
        """Returns the file of a step's checkpoint."""
        return self.folder / f"{step}.safetensors"

    def read(self, step: int) -> bytes:
        """Returns the bytes of a checkpoint.

        Raises:
            ValueError: they are not those that were written.
            OSError: they cannot be read.
        """
        return _read_whole(self.path(step))

    def save(self, state: TrainState, info: CheckpointInfo) -> None:
        """Starts to write a checkpoint, unless its step has one; training may go on at once.

        Args:
            state: replicated; the copy on this process's first device is written. It is copied there first, since
                the next step overwrites it.
            info: the checkpoint.

        Raises:
            OSError: the checkpoint before this one could not be written.
        """
        self.wait()
        if info.step in self.found:
            return
        leaves, structure = jax.tree.flatten(state)
        copied = _copy([leaf.addressable_data(0) for leaf in leaves])
        self._writing = self._writer.submit(self._commit, jax.tree.unflatten(structure, copied), info)

    def wait(self) -> None:
        """Returns when nothing is being written; raises the OSError of what was."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def check(self) -> None:
        """Raises the OSError of a checkpoint that could not be written; waits for none."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def close(self) -> None:
        """Waits until nothing is being written any more, whatever becomes of it; nothing can be saved afterwards."""
        self._writer.shutdown()

    def _commit(self, state: TrainState, info: CheckpointInfo) -> None:
        data, path = encode(state, info), self.path(info.step)
        for left in (path, partial_path(path)):  # damaged, or it would have been found
            if left.exists():
                self._move_aside(left, info.step)
        for file, content in ((_digest_path(path), _digest_line(data, path)), (path, data)):  # the digest first
            with atomic_write(file, durable=True) as partial:
                partial.write_bytes(content)
        sync(self.folder)
        self.found[info.step] = info
        best = self.best
        kept = {*sorted(self.found)[-self._keep :], *([best.step] if best else [])}
        for step in [step for step in self.found if step not in kept]:
            del self.found[step]
            for old in (self.path(step), _digest_path(self.path(step))):
                old.unlink(missing_ok=True)

    def _move_aside(self, path: Path, step: int) -> None:
        names = (self.folder / f"{step}.damaged{number}.safetensors" for number in count(1))
        aside = path.rename(next(name for name in names if not name.exists()))
        with suppress(FileNotFoundError):
            _digest_path(path).rename(_digest_path(aside))
