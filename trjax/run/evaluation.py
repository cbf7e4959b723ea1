"""Evaluation: every example of a source is scored once."""

from collections.abc import Callable
from typing import Any

import numpy as np

from trjax.data.batches import eval_batches
from trjax.data.sources import Source
from trjax.step.evaluation import init_totals
from trjax.step.program import Program


def evaluate_source(
    program: Program,
    source: Source,
    global_batch: int,
    params: Any,
    batch_stats: Any,
    keep_going: Callable[[], bool] = lambda: True,
) -> np.ndarray | None:
    """Returns the scores of all examples of a source, summed, float64, shape (4,).

    Args:
        program: compiled; this process's part of every batch is read.
        source: of the examples.
        global_batch: examples of a batch; the last one is padded.
        params: on the devices.
        batch_stats: likewise.
        keep_going: is asked after every batch; if it answers False, there are no scores.
    """
    totals = init_totals(program.mesh)
    for batch in eval_batches(source, global_batch, program.eval_rows):
        totals = program.accumulate(totals, params, batch_stats, program.place(batch))
        if not keep_going():
            return None
    return np.asarray(program.reduce_totals(totals), np.float64)
