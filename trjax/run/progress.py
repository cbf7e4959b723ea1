"""What a run needs, and where it is: what the loop hands from step to step."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import jax
import numpy as np

from trjax.config.run import Config
from trjax.data.batches import Batch, train_batches
from trjax.data.sources import Source
from trjax.mesh import REPLICATED, place
from trjax.run.checkpoints import Checkpoints
from trjax.run.display import Display
from trjax.run.profile import Profiler
from trjax.run.records import Meter, Record, Split, append_metrics, make_record
from trjax.step.plan import NUM_RESULTS, NUM_SCORES
from trjax.step.program import Program


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
        profiler: of some of its steps.
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
    profiler: Profiler

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
            input_seconds=round(meter.input_seconds, 6),
        )
        meter.restart()
        if self.checkpoints is not None:
            append_metrics(self.workdir / "metrics.jsonl", record)
            self.board(record)
        self.display.record(record)
        return record

    def batches(self, start_step: int, end_step: int) -> Iterator[Batch]:
        """Yields this process's part of the batches of these steps."""
        config, rows = self.config, self.program.rows
        recipe = self.train_source, config.global_batch, config.seed
        return train_batches(*recipe, start_step, end_step, config.last_batch, rows)


@dataclass
class Progress:
    """Where a run is, as the results that were read tell: those of a step are read when the next one runs.

    Attributes:
        run: the run.
        skipped: steps that changed nothing, since the run began.
        step: the last one whose results were read.
        learning_rate: of that step.
        bad_in_row: steps that changed nothing, since the last good one.
        stopping: all processes have agreed to stop.
        gave_up: the first and the last of too many bad steps in a row.
        unread: the first of some steps, and their results on the devices, shape (steps, 6).
        meter: of the steps that are in no record yet.
        told: how many examples of each source were named that could not be read.
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
    told: Counter[int] = field(default_factory=Counter)

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
        run.fed(self.step)
        epoch = (self.step - 1) // run.program.steps_per_epoch + 1
        run.display.advance(self.step, epoch, scores, self.meter.images_per_second)
        if self.bad_in_row == run.config.max_bad_steps > 0:
            self.gave_up, self.stopping = (self.step + 1 - self.bad_in_row, self.step), True

    def may_give_up_within(self, count: int) -> bool:
        """Returns whether one of `count` more steps may follow the one that is one bad step too many."""
        unread = 0 if self.unread is None else self.unread[1].size // (NUM_RESULTS + 1)
        return self.bad_in_row + unread + count - 1 >= self.run.config.max_bad_steps > 0

    def tell_problems(self, source: Source) -> None:
        """Names the examples that could not be read and were not named before."""
        if len(source.problems) == self.told[id(source)]:
            return
        for name, reason in list(source.problems.items())[self.told[id(source)] :]:
            self.told[id(source)] += 1
            self.run.display.warn(f"warning: {name} is left out, {self.told.total()} so far: {reason}")

    def write(self) -> None:
        """Writes the record of what was read since the last one, if anything was."""
        self.read()
        if self.meter.steps:
            self.run.record("train", self.meter, self.step, self.learning_rate)
