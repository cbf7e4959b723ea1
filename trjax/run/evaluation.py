"""Every example of a source scored once; and `--eval-only`, for the model of an earlier run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trjax.config.run import Config
from trjax.data.batches import eval_batches
from trjax.data.sources import Source, load
from trjax.run.saved_model import read_state
from trjax.run.workdir import check_same_run
from trjax.step.compile import compile_evaluation
from trjax.step.evaluation import init_totals
from trjax.step.program import Program
from trjax.step.state import models_of


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


def evaluate_run(config: Config) -> list[str]:
    """Evaluates a run's model, and its running means if it keeps them; changes nothing in its folder.

    Returns:
        A line for each.

    Raises:
        ValueError: there is no such run, or it has other options.
    """
    if not config.workdir:
        raise ValueError("eval_only: which run? Pass its --workdir")
    check_same_run(config, Path(config.workdir))
    saved, program, state, step = read_state(Path(config.workdir), "last", config.platform, config.devices)
    source = load(replace(saved.data, root=config.data.root))[1]
    program, lines = compile_evaluation(program), []
    formats = (program.layouts.formats.params, program.layouts.formats.batch_stats)
    for split, model in models_of(state).items():
        scores = evaluate_source(program, source, saved.global_batch, *jax.device_put(model, formats))
        assert scores is not None
        loss, top1, top5 = scores[:3] / scores[3]
        name = {"test": "parameters", "ema": "running means"}[split]
        numbers = f"loss {loss:.4f}  top-1 {top1:.2%}  top-5 {top5:.2%}"
        lines.append(f"step {step}, {name}: {numbers} of {scores[3]:,.0f} examples")
    return lines
