"""The loop of a run: epochs of steps, an evaluation and a checkpoint after each."""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import jax
import numpy as np

from trjax.checkpoint import About, Checkpoints
from trjax.config import Config
from trjax.data.batches import Batch, epoch_order, train_batches
from trjax.data.sources import Source
from trjax.evaluation import evaluate_source
from trjax.mesh import REPLICATED, place
from trjax.plan import NUM_SCORES
from trjax.processes import exchange
from trjax.program import Program
from trjax.records import Display, Meter, Record, Split, append_metrics, make_record
from trjax.state import TrainState, models_of

BAD_STEP = "bad_step.json"
"""In the run's folder: the batch at which a run gave up."""


class BadNumbersError(Exception):
    """Too many steps in a row whose gradients are not finite."""


@dataclass(frozen=True)
class Run:
    """What the loop needs and never changes.

    Attributes:
        config: the run.
        workdir: its folder.
        program: compiled.
        train_source: examples to learn from.
        test_source: examples to be tested on.
        learning_rates: of every update, float32.
        checkpoints: of the run; None on all processes but the first, which alone writes.
        display: for the console.
        board: for TensorBoard.
        started: when, `time.perf_counter`.
        interrupted: tells whether this process is to stop.
        alone: there is no other process.
        fed: to be told of every step: the watchdog.
    """

    config: Config
    workdir: Path
    program: Program
    train_source: Source
    test_source: Source
    learning_rates: np.ndarray
    checkpoints: Checkpoints | None
    display: Display
    board: Callable[[Record], None]
    started: float
    interrupted: Callable[[], bool]
    alone: bool
    fed: Callable[[int], None]

    @cached_property
    def rates(self) -> jax.Array:
        """The learning rates on the devices."""
        return place(self.program.mesh, REPLICATED, self.learning_rates)

    @cached_property
    def votes(self) -> dict[bool, jax.Array]:
        """What this process answers to: stop? On the devices."""
        return {asked: self.program.votes(asked) for asked in (False, True)}

    def record(self, split: Split, meter: Meter, step: int, learning_rate: float) -> Record:
        """Writes what the meter has gathered to the file and the console, and empties it."""
        record = make_record(
            split,
            meter.totals,
            skipped=meter.skipped,
            epoch=(step - 1) // self.program.steps_per_epoch + 1,
            step=step,
            learning_rate=float(f"{learning_rate:.7g}"),  # float32 has no more digits
            images_per_second=meter.images_per_second,
            seconds=time.perf_counter() - self.started,
        )
        meter.restart()
        if self.checkpoints is not None:
            append_metrics(self.workdir / "metrics.jsonl", record)
            self.board(record)
        self.display.record(record)
        return record

    def batches(self, start_step: int, end_step: int) -> Iterator[Batch]:
        """Yields this process's part of the batches of these steps."""
        config = self.config
        return train_batches(
            self.train_source, config.global_batch, config.seed, start_step, end_step, config.last_batch,
            self.program.rows,
        )  # fmt: skip


@dataclass
class _Progress:
    """Where a run is, as the results that were read tell: those of a step are read when the next one runs.

    Attributes:
        run: the run.
        skipped: steps that changed nothing, since the run began.
        step: the last one whose results were read.
        learning_rate: of that step.
        bad_in_row: steps that changed nothing, since the last good one.
        stopping: all processes have agreed to stop.
        gave_up: the first and the last of too many bad steps in a row.
        unread: a step, and its results on the devices.
        meter: of the steps that are in no record yet.
    """

    run: Run
    skipped: int
    step: int = 0
    learning_rate: float = 0.0
    bad_in_row: int = 0
    stopping: bool = False
    gave_up: tuple[int, int] | None = None
    unread: tuple[int, jax.Array] | None = None
    meter: Meter = field(default_factory=Meter)

    def read(self) -> None:
        """Waits for the results of the step that are not read yet, if there are any, and takes them in."""
        if self.unread is None:
            return
        (self.step, outcome), self.unread, run = self.unread, None, self.run
        values = np.asarray(outcome, np.float64)
        scores, bad = values[:NUM_SCORES], bool(values[-1])
        self.stopping |= bool(values[NUM_SCORES])
        self.learning_rate = float(run.learning_rates[self.step - 1 - self.skipped])
        self.skipped += bad
        self.bad_in_row = self.bad_in_row + 1 if bad else 0
        self.meter.add(scores, bad)
        run.fed(self.step)
        epoch = (self.step - 1) // run.program.steps_per_epoch + 1
        run.display.advance(self.step, epoch, scores, self.meter.images_per_second)
        if self.step % run.config.log_every == 0:
            self.write()
        if self.bad_in_row == run.config.max_bad_steps > 0:
            self.gave_up, self.stopping = (self.step + 1 - self.bad_in_row, self.step), True

    def write(self) -> None:
        """Writes the record of what was read since the last one, if anything was."""
        self.read()
        if self.meter.steps:
            self.run.record("train", self.meter, self.step, self.learning_rate)


def _save(
    run: Run, state: TrainState, step: int, scores: tuple[float | None, float | None] = (None, None)
) -> TrainState:
    """Starts to save, and returns the whole state; what is sharded is gathered before, by all processes."""
    whole = run.program.forms.unload(state)
    if run.checkpoints is not None:
        epoch, batch = divmod(step, run.program.steps_per_epoch)
        run.checkpoints.save(whole, About(step, {"epoch": epoch, "batch": batch}, asdict(run.config), *scores))
    return whole


def _train(run: Run, state: TrainState, progress: _Progress, start_step: int, end_step: int) -> tuple[TrainState, int]:
    """Trains up to `end_step` or a stop; results are read one step late, so that the devices never wait.

    Every process reads the same results, and so all stop behind the same step.

    Returns:
        The state, and the step that it is behind.
    """
    config, program, step = run.config, run.program, start_step
    size = config.data.size_at(start_step // program.steps_per_epoch)
    train_step = program.step_of(size)
    asked = not run.alone and run.interrupted()
    progress.meter.restart()
    for batch in run.batches(start_step, end_step):
        if progress.bad_in_row + 1 >= config.max_bad_steps > 0:
            progress.read()  # that step may be one too many, and no other must follow it
            if progress.stopping:
                break
        state, outcome = train_step(state, program.place_train(batch), run.rates, run.votes[asked])
        step += 1
        progress.read()
        progress.unread = (step, outcome)
        asked = run.interrupted()
        if progress.stopping or (run.alone and asked):
            break
        if config.save_every and step % config.save_every == 0 and step < end_step:
            progress.write()  # records are never behind a checkpoint
            _save(run, state, step)
        if run.checkpoints is not None:
            run.checkpoints.check()
    progress.write()
    return state, step


def _evaluate(run: Run, state: TrainState, step: int, learning_rate: float) -> tuple[float, float] | None:
    """Evaluates every test example once, also with the running means, if any; writes the records.

    Returns:
        Top-1, and the score of the checkpoint; None if it was interrupted, which needs no other process to agree.
    """
    meters = dict[Split, Meter]()

    def goes_on() -> bool:
        run.fed(step)
        return not (run.alone and run.interrupted())

    for split, model in models_of(state).items():
        meters[split] = Meter()
        scores = evaluate_source(run.program, run.test_source, run.config.global_batch, *model, goes_on)
        if scores is None:
            return None
        meters[split].add(scores)
        meters[split].stop()
    records = {split: run.record(split, meter, step, learning_rate) for split, meter in meters.items()}
    kind, name = run.config.best_by.split("/")
    value = next(float(getattr(record, name)) for split, record in records.items() if split == kind)
    score = -value if name == "loss" else value
    return records["test"].top1, score if math.isfinite(score) else -math.inf


def _write_bad_step(run: Run, step: int, first: int) -> None:
    """Writes down the first of the bad batches, with which `--replay-step` does that step again."""
    epoch, position = divmod(first - 1, run.program.steps_per_epoch)
    batch, path = run.config.global_batch, run.workdir / BAD_STEP
    indices = epoch_order(run.config.seed, epoch, len(run.train_source))[position * batch : (position + 1) * batch]
    found = {
        "step": first - 1, "epoch": epoch, "devices": run.program.mesh.size, "indices": indices.tolist(),
        "checkpoint": step,
    }  # fmt: skip
    path.with_suffix(".partial").write_text(json.dumps(found) + "\n", encoding="utf-8")
    path.with_suffix(".partial").replace(path)


def run_loop(run: Run, state: TrainState, step: int, evaluated: bool) -> tuple[int, bool]:
    """Trains, evaluates and saves after each epoch and every `save_every` steps, until the end or a stop.

    Args:
        run: the run.
        state: to go on from.
        step: that it is behind.
        evaluated: that is done, if the step is the last one of an epoch; a stop comes before it, so as not to wait.

    Returns:
        The step, and whether the evaluation has been done, at which the run is then.

    Raises:
        BadNumbersError: too many steps in a row were bad.
        OSError: a checkpoint could not be written.
    """
    whole = state
    end_step, per_epoch = len(run.learning_rates), run.program.steps_per_epoch
    skipped = int(state.skipped)
    progress = _Progress(run, skipped, learning_rate=float(run.learning_rates[max(step - 1 - skipped, 0)]))

    def stopped() -> bool:
        return progress.stopping or (run.alone and run.interrupted())

    while (step < end_step or not evaluated) and not stopped():
        if evaluated:
            epoch_end = (step // per_epoch + 1) * per_epoch
            state, step = _train(run, state, progress, step, epoch_end)
            evaluated = step < epoch_end
        scores = None
        if not evaluated and not stopped():
            scores = _evaluate(run, state, step, progress.learning_rate)
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
