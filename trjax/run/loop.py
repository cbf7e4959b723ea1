"""The loop of a run: epochs of steps, an evaluation and a checkpoint after each."""

import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice

import jax
import numpy as np
from jax.profiler import TraceAnnotation

from trjax.data.batches import Batch, epoch_order, train_batches
from trjax.data.sources import Source
from trjax.files import atomic_write
from trjax.run.checkpoints import CheckpointInfo
from trjax.run.context import RunContext
from trjax.run.evaluation import evaluate_source
from trjax.run.processes import exchange
from trjax.run.profile import INPUT
from trjax.run.records import Meter, Split
from trjax.step.plan import NUM_RESULTS, NUM_SCORES
from trjax.step.state import TrainState, models_of

BAD_STEP = "bad_step.json"
"""In the run's folder: the batch at which a run gave up."""


class BadNumbersError(Exception):
    """Too many steps in a row whose gradients are not finite."""


@dataclass
class Progress:
    """How far a run is, by the results that were read: those of a step are read while the next one runs.

    Attributes:
        run: the run.
        skipped: steps of the whole run that were skipped, because a gradient was not finite.
        step: the last one whose results were read.
        learning_rate: of that step.
        bad_in_row: steps skipped since the last good one.
        stopping: all processes have agreed to stop.
        gave_up: the first and the last of too many bad steps in a row.
        unread: the first of some steps, and their results on the devices, shape (steps, 6).
        meter: of the steps that are in no record yet.
        reported: the number of unreadable examples of each source that were reported.
    """

    run: RunContext
    skipped: int
    step: int = 0
    learning_rate: float = 0.0
    bad_in_row: int = 0
    stopping: bool = False
    gave_up: tuple[int, int] | None = None
    unread: tuple[int, jax.Array] | None = None
    meter: Meter = field(default_factory=Meter)
    reported: Counter[int] = field(default_factory=Counter)

    def read(self) -> None:
        """Waits for the results that are not read yet, if there are any, and takes them in."""
        if self.unread is None:
            return
        (first, outcomes), self.unread = self.unread, None
        for step, values in enumerate(np.asarray(outcomes, np.float64).reshape(-1, NUM_RESULTS + 1), start=first):
            self._take(step, values)
        if self.step // self.run.config.log_every > (first - 1) // self.run.config.log_every:
            self.write()  # once for all steps of a call: their time is one

    def _take(self, step: int, values: np.ndarray) -> None:
        """Takes in the results of one step."""
        self.step, run = step, self.run
        scores, bad = values[:NUM_SCORES], bool(values[-1])
        self.stopping |= bool(values[NUM_SCORES])
        self.learning_rate = float(run.learning_rates[self.step - 1 - self.skipped])
        self.skipped += bad
        self.bad_in_row = self.bad_in_row + 1 if bad else 0
        self.meter.add(scores, bad)
        run.report_step(self.step)
        epoch = (self.step - 1) // run.program.steps_per_epoch + 1
        run.display.advance(self.step, epoch, scores, self.meter.images_per_second)
        if self.bad_in_row == run.config.max_bad_steps > 0:
            self.gave_up, self.stopping = (self.step + 1 - self.bad_in_row, self.step), True

    def may_give_up_within(self, count: int) -> bool:
        """Returns whether one of `count` more steps may follow the one that is one bad step too many."""
        unread = 0 if self.unread is None else self.unread[1].size // (NUM_RESULTS + 1)
        return self.bad_in_row + unread + count - 1 >= self.run.config.max_bad_steps > 0

    def report_problems(self, source: Source) -> None:
        """Warns of the examples that could not be read, of each once."""
        if len(source.problems) == self.reported[id(source)]:
            return
        for name, reason in list(source.problems.items())[self.reported[id(source)] :]:
            self.reported[id(source)] += 1
            self.run.display.warn(f"warning: {name} is left out, {self.reported.total()} so far: {reason}")

    def write(self) -> None:
        """Writes the record of what was read since the last one, if anything was."""
        self.read()
        if self.meter.steps:
            self.run.record("train", self.meter, self.step, self.learning_rate)


def _save(
    run: RunContext, state: TrainState, step: int, scores: tuple[float | None, float | None] = (None, None)
) -> TrainState:
    """Starts to save, and returns the whole state; all processes gather its shards first."""
    whole = run.program.layouts.unload(state)
    if run.checkpoints is not None:
        epoch, batch = divmod(step, run.program.steps_per_epoch)
        run.checkpoints.save(whole, CheckpointInfo(step, {"epoch": epoch, "batch": batch}, asdict(run.config), *scores))
    return whole


def _in_calls(
    run: RunContext, progress: Progress, batches: Iterator[Batch], start_step: int, end_step: int
) -> Iterator[tuple[int, Batch]]:
    """Yields the batches of each call, on the devices, and their number: as many as may go into one, or a single one.

    No checkpoint is due inside of a call, and no step of it follows the one that is one bad step too many.
    """
    config, step = run.config, start_step
    while step < end_step:
        save_at = (step // config.save_every + 1) * config.save_every if config.save_every else end_step
        fits = step + config.steps_per_dispatch <= min(end_step, save_at)
        count = config.steps_per_dispatch if fits else 1
        if progress.may_give_up_within(count):
            progress.read()
            if progress.stopping:
                return
            if progress.may_give_up_within(count):
                count = 1
        progress.meter.leave_out(run.profiler.begin(step, count, progress.unread))
        began = time.perf_counter()
        with TraceAnnotation(INPUT):
            placed = run.program.place_train(*islice(batches, count))
        progress.meter.input_seconds += time.perf_counter() - began
        progress.report_problems(run.train_source)
        yield count, placed
        step += count


def _train(
    run: RunContext, state: TrainState, progress: Progress, batches: Iterator[Batch], start_step: int, end_step: int
) -> tuple[TrainState, int]:
    """Trains up to `end_step` or a stop; results are read one step late, so that the devices never wait.

    Every process reads the same results, and so all stop after the same step.

    Returns:
        The state, and the number of steps done.
    """
    config, program, step = run.config, run.program, start_step
    size = config.data.size_at(start_step // program.steps_per_epoch)
    asked = not run.alone and run.interrupted()
    progress.meter.restart()
    call = program.steps[size, 1]
    for count, batch in _in_calls(run, progress, batches, start_step, end_step):
        call = program.steps[size, count]
        state, outcomes = call(state, batch, run.rates, run.votes[asked])
        progress.read()
        progress.unread = (step + 1, outcomes)
        step += count
        progress.meter.leave_out(run.profiler.end(step, outcomes, call))
        asked = run.interrupted()
        if progress.stopping or (run.alone and asked):
            break
        if config.save_every and step % config.save_every == 0 and step < end_step:
            progress.write()  # a checkpoint has all records of its steps
            _save(run, state, step)
        if run.checkpoints is not None:
            run.checkpoints.check()
    progress.meter.leave_out(run.profiler.end(step, state.step, call, whole=True))
    progress.write()
    return state, step


def _evaluate(run: RunContext, state: TrainState, progress: Progress, step: int) -> tuple[float, float] | None:
    """Evaluates every test example once, also with the running means, if any; writes the records.

    Returns:
        Top-1, and the score of the checkpoint; None if it was interrupted, which needs no other process to agree.
    """
    meters = dict[Split, Meter]()

    def keep_going() -> bool:
        run.report_step(step)
        return not (run.alone and run.interrupted())

    for split, model in models_of(state).items():
        meters[split] = Meter()
        scores = evaluate_source(run.program, run.test_source, run.config.global_batch, *model, keep_going)
        if scores is None:
            return None
        meters[split].add(scores)
        meters[split].stop()
    progress.report_problems(run.test_source)
    records = {split: run.record(split, meter, step, progress.learning_rate) for split, meter in meters.items()}
    kind, name = run.config.best_by.split("/")
    value = next(float(getattr(record, name)) for split, record in records.items() if split == kind)
    score = -value if name == "loss" else value
    return records["test"].top1, score if math.isfinite(score) else -math.inf


def _write_bad_step(run: RunContext, step: int, first: int) -> None:
    """Writes down the first of the bad batches, with which `--replay-step` does that step again."""
    epoch, position = divmod(first - 1, run.program.steps_per_epoch)
    batch, path = run.config.global_batch, run.workdir / BAD_STEP
    indices = epoch_order(run.config.seed, epoch, len(run.train_source))[position * batch : (position + 1) * batch]
    found = {"step": first - 1, "epoch": epoch, "devices": run.program.mesh.size, "indices": indices.tolist()}
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(found | {"checkpoint": step}) + "\n", encoding="utf-8")


def run_loop(run: RunContext) -> tuple[int, bool]:
    """Trains, evaluates and saves after each epoch and every `save_every` steps, until the end or a stop.

    If an evaluation is due, it comes first. A stop comes before an evaluation, which takes long.

    Returns:
        The number of steps done, and whether the evaluation of the last epoch has been done, too.

    Raises:
        BadNumbersError: too many steps in a row were bad.
        OSError: a checkpoint could not be written.
    """
    whole = state = run.state
    step, evaluated, per_epoch = run.step, run.evaluated, run.program.steps_per_epoch
    end_step, skipped = len(run.learning_rates), int(state.skipped)
    progress = Progress(run, skipped, learning_rate=float(run.learning_rates[max(step - 1 - skipped, 0)]))
    # Of all epochs: reading ahead continues during an evaluation.
    examples = run.train_source, run.config.global_batch, run.config.seed
    batches = train_batches(*examples, step, end_step, run.config.last_batch, run.program.rows)

    def stopped() -> bool:
        return progress.stopping or (run.alone and run.interrupted())

    while (step < end_step or not evaluated) and not stopped():
        if evaluated:
            epoch_end = (step // per_epoch + 1) * per_epoch
            state, step = _train(run, state, progress, batches, step, epoch_end)
            evaluated = step < epoch_end
        scores = None
        if not evaluated and not stopped():
            scores = _evaluate(run, state, progress, step)
            evaluated = scores is not None
        whole = _save(run, state, step, scores or (None, None))
    jax.block_until_ready(whole)
    if run.checkpoints is not None:
        run.checkpoints.wait()
        if progress.gave_up:
            _write_bad_step(run, step, progress.gave_up[0])
    exchange("done", "")  # none leaves while another still needs it
    if progress.gave_up:
        first, last = progress.gave_up
        raise BadNumbersError(
            f"{last + 1 - first} steps in a row, the first of them step {first}, had gradients that are not finite, "
            f"and changed nothing. What was in its batch is in {run.workdir / BAD_STEP}; "
            f"see where it begins with: python -m trjax.train --workdir {run.workdir} --replay-step"
        )
    return step, evaluated
