"""The order of examples, and global batches of one fixed size."""

from collections.abc import Callable, Iterator
from functools import lru_cache
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


class Inputs(NamedTuple):
    """What the network gets of a block, and what it is to say.

    Attributes:
        images: float32, shape (examples, height, width, channels).
        targets: probabilities, float32, shape (examples, classes); None: those of the labels.
    """

    images: Any
    targets: Any = None


def epoch_order(seed: int, epoch: int, num_examples: int) -> np.ndarray:
    """Returns the order of an epoch: a permutation that depends on (seed, epoch) alone.

    Source: Philox 4x64, Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
    """
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(num_examples)


_keep_order = lru_cache(maxsize=2)(epoch_order)


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


def read_batch(source: Source, indices: np.ndarray, rows: np.ndarray, epoch: int | None) -> Batch:
    """Returns those rows of a batch, in order; the batch is padded where there are fewer examples.

    An example with a negative label could not be read: like padding, it counts for nothing.

    Args:
        source: of the examples.
        indices: of the batch's.
        rows: positions in the batch of those that are read.
        epoch: of the training that they are for; None: for an evaluation.
    """
    indices = indices[rows[rows < len(indices)]]
    images, labels = source.read(indices, epoch)
    padding = len(rows) - len(indices)
    fill = [(0, padding)]
    return Batch(
        np.pad(images, fill + [(0, 0)] * (images.ndim - 1)),
        np.pad(labels.clip(0), fill).astype(np.int32),
        np.pad((labels >= 0).astype(np.float32), fill),
        np.pad(indices, fill).astype(np.int32),
    )


def _read_ahead(count: int, read: Callable[[int], Batch], workers: int) -> Iterator[Batch]:
    """Yields `read` of 0 up to `count`, in order; so many threads read ahead, each a batch of its own."""
    if not workers:
        yield from map(read, range(count))
        return
    import grain  # not quick to import, and seldom needed

    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=workers + 1)
    yield from grain.MapDataset.range(count).map(read).to_iter_dataset(options)


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

    def read(ahead: int) -> Batch:
        epoch, position = divmod(start_step + ahead, per_epoch)
        indices = _keep_order(seed, epoch, len(source))[position * global_batch : (position + 1) * global_batch]
        return read_batch(source, indices, rows, epoch)

    yield from _read_ahead(end_step - start_step, read, source.workers)


def eval_batches(source: Source, global_batch: int, rows: np.ndarray | None = None) -> Iterator[Batch]:
    """Yields every example once, in the source's order, or those `rows` of every batch; the last one is padded."""
    rows = np.arange(global_batch) if rows is None else rows

    def read(ahead: int) -> Batch:
        indices = np.arange(ahead * global_batch, min((ahead + 1) * global_batch, len(source)))
        return read_batch(source, indices, rows, None)

    yield from _read_ahead(-(-len(source) // global_batch), read, source.workers)
