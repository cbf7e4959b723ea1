"""The order of examples, and global batches of one fixed size."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from trjax.data.sources import Source


class Batch(NamedTuple):
    """A global batch, or one device's block of it; padding fills it to its fixed size.

    Arrays of the host, of the devices, or shapes, as `jax.tree` functions make them.

    Attributes:
        images: uint8, shape (batch, height, width, channels).
        labels: int32, shape (batch,).
        mask: float32, shape (batch,): 1 for real examples, 0 for padding.
        indices: int32, shape (batch,): the example's index in its source, which keys its augmentation.
    """

    images: Any
    labels: Any
    mask: Any
    indices: Any


def epoch_order(seed: int, epoch: int, num_examples: int) -> np.ndarray:
    """Returns the order of an epoch: a permutation that depends on (seed, epoch) alone.

    Source: Philox 4x64, Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
    """
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(num_examples)


def count_batches(num_examples: int, global_batch: int, last_batch: Literal["pad", "drop"] = "pad") -> int:
    """Returns the number of batches of an epoch: the last one padded, or left out if it is not full.

    >>> count_batches(1437, 96), count_batches(1437, 96, "drop")
    (15, 14)

    Raises:
        ValueError: it is left out, and there is no other.
    """
    if last_batch == "pad":
        return -(-num_examples // global_batch)
    if num_examples < global_batch:
        raise ValueError(
            f"last_batch=drop with global_batch={global_batch}: {num_examples} examples do not fill one batch; "
            "use a smaller one, or last_batch=pad"
        )
    return num_examples // global_batch


def _read_batch(source: Source, indices: np.ndarray, rows: np.ndarray) -> Batch:
    """Returns those rows of a batch, in order; the batch is padded where there are fewer examples."""
    indices = indices[rows[rows < len(indices)]]
    images, labels = source.read(indices)
    padding = len(rows) - len(indices)
    fill = [(0, padding)]
    return Batch(
        np.pad(images, fill + [(0, 0)] * (images.ndim - 1)),
        np.pad(labels, fill).astype(np.int32),
        np.pad(np.ones(len(indices), np.float32), fill),
        np.pad(indices, fill).astype(np.int32),
    )


def train_batches(
    source: Source,
    global_batch: int,
    seed: int,
    start_step: int,
    end_step: int,
    last_batch: Literal["pad", "drop"] = "pad",
    rows: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Yields the batches of steps `start_step` up to `end_step`, whatever came before: nothing is replayed.

    Args:
        source: of the examples.
        global_batch: examples of a batch.
        seed: of the order.
        start_step: from 0.
        end_step: the first that is left out.
        last_batch: of an epoch, if it is not full.
        rows: positions in the batch of those examples that are read, in order; None: all.
    """
    rows = np.arange(global_batch) if rows is None else rows
    per_epoch = count_batches(len(source), global_batch, last_batch)
    order_epoch, order = -1, np.empty(0, np.int64)
    for step in range(start_step, end_step):
        epoch, position = divmod(step, per_epoch)
        if epoch != order_epoch:
            order_epoch, order = epoch, epoch_order(seed, epoch, len(source))
        yield _read_batch(source, order[position * global_batch : (position + 1) * global_batch], rows)


def eval_batches(source: Source, global_batch: int, rows: np.ndarray | None = None) -> Iterator[Batch]:
    """Yields every example once, in the source's order, or those `rows` of every batch; the last one is padded."""
    rows = np.arange(global_batch) if rows is None else rows
    for start in range(0, len(source), global_batch):
        yield _read_batch(source, np.arange(start, min(start + global_batch, len(source))), rows)
