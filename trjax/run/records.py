"""Records of a run: sums of scores, the lines of `metrics.jsonl`, TensorBoard."""

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from trjax.files import atomic_write

Split = Literal["train", "test", "ema"]
_START = b'{"split": "'
_CUT_OFF = re.compile(re.escape(_START) + rb"[ -|~]{0,999}")
"""A line that `append_metrics` had begun to write: printable, and no closing brace."""


@dataclass(frozen=True)
class Record:
    """One line of `metrics.jsonl`.

    Attributes:
        split: `train`, `test`, or `ema`: the test examples, with the running mean of the parameters.
        epoch: from 1; the epoch that the step belongs to.
        step: updates done.
        loss: mean cross-entropy of the examples.
        top1: fraction of 1.
        top5: fraction of 1.
        examples: how many the line covers.
        skipped: steps skipped because a gradient was not finite; their examples do not count.
        learning_rate: of the step.
        images_per_second: over the line's own time; compilation comes before.
        seconds: since the process began to train.
        input_seconds: that the host was at work to bring the line's batches to the devices, or waited for them to be
            read; what the devices computed meanwhile is not lost.
    """

    split: Split
    epoch: int
    step: int
    loss: float
    top1: float
    top5: float
    examples: int
    skipped: int
    learning_rate: float
    images_per_second: float
    seconds: float
    input_seconds: float = 0.0


def make_record(split: Split, results: np.ndarray, **rest: Any) -> Record:
    """Returns the record of summed scores, shape (4,).

    >>> make_record("test", np.array([5.0, 8, 10, 10]), skipped=0, epoch=1, step=2, learning_rate=0.1,
    ...             images_per_second=1.0, seconds=1.0).top1
    0.8
    """
    loss, top1, top5, count = (float(value) for value in results)
    examples = max(count, 1.0)
    return Record(split, loss=loss / examples, top1=top1 / examples, top5=top5 / examples, examples=int(count), **rest)


class Meter:
    """Sums the scores of batches, and measures the time since the last restart."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forgets the sums and starts the clock."""
        self.totals, self.steps, self.skipped, self.input_seconds = np.zeros(4), 0, 0, 0.0
        self._since, self._until = time.perf_counter(), 0.0

    def stop(self) -> None:
        """Stops the clock."""
        self._until = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Takes time that no step took off the clock."""
        self._since += seconds

    def add(self, scores: np.ndarray, skipped: bool = False) -> None:
        """Adds the scores of one batch, shape (4,), unless it was skipped."""
        self.steps += 1
        self.skipped += skipped
        if not skipped:
            self.totals = self.totals + scores

    @property
    def images_per_second(self) -> float:
        """Examples a second since the last restart, until the clock was stopped."""
        return float(self.totals[3]) / max((self._until or time.perf_counter()) - self._since, 1e-9)


def _step_of(line: bytes) -> int | None:
    """Returns the step of a line of `metrics.jsonl`; None if it is not one of a run."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("split") not in get_args(Split):
        return None
    step = record.get("step")
    return step if type(step) is int else None


def _set_aside(path: Path) -> Path:
    """Renames a file to the first name that is free, and returns it."""
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in count())
    return path.rename(next(name for name in names if not os.path.lexists(name)))


def trim_metrics(path: Path, step: int) -> Path | None:
    """Drops the lines of steps after `step`, which a resumed run repeats, and a last one cut off by a crash.

    A file that holds anything but lines of a run, wherever that comes from, is kept as it is under another name.

    Returns:
        That name, if there is anything else.

    Raises:
        OSError: the file cannot be read or written.
    """
    if not path.exists():
        return None
    content = path.read_bytes()
    *lines, last = content.split(b"\n")
    if _START.startswith(last) or _CUT_OFF.fullmatch(last):
        last = b""  # the process died while it wrote this line
    lines = [line for line in (*lines, last) if line.strip()]
    steps = [_step_of(line) for line in lines]
    kept = [line + b"\n" for line, its in zip(lines, steps, strict=True) if its is not None and its <= step]
    if (replacement := b"".join(kept)) == content:
        return None
    with atomic_write(path) as partial:
        partial.write_bytes(replacement)
        return _set_aside(path) if None in steps else None


def read_metrics(path: Path) -> list[Record]:
    """Returns the lines of `metrics.jsonl`, in order; other lines are skipped.

    Raises:
        OSError: it cannot be read.
    """
    records = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        if _step_of(line) is not None:
            with suppress(TypeError):  # of another version
                values: Any = {key: math.nan if value is None else value for key, value in json.loads(line).items()}
                records.append(Record(**values))
    return records


def append_metrics(path: Path, record: Record) -> None:
    """Appends one line; it is in the file when this returns. A loss that is not finite becomes null."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(record).items()
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(finite, allow_nan=False) + "\n")


@contextmanager
def open_board(folder: Path | None, step: int) -> Iterator[Callable[[Record], None]]:
    """Gives a function that writes a record for TensorBoard; TensorBoard drops those of steps after `step`.

    Args:
        folder: for its files; None: nothing is written.
        step: at which the run resumes.
    """
    if folder is None:
        yield lambda record: None
        return
    from tensorboardX import SummaryWriter  # not quick to import, and seldom asked for

    def write(record: Record) -> None:
        names = ["loss", "top1", "top5", "images_per_second"]
        for name in [*names, "learning_rate"] if record.split == "train" else names:
            writer.add_scalar(f"{record.split}/{name}", getattr(record, name), record.step)

    with SummaryWriter(str(folder), purge_step=step + 1, flush_secs=10) as writer:
        yield write
