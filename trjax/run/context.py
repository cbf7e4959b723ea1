"""What a run consists of and never changes: `RunSetup` before it compiles, `RunContext` while it trains."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
import numpy as np

from trjax.config.run import Config
from trjax.data.sources import Source
from trjax.mesh import REPLICATED, place
from trjax.run.checkpoints import Checkpoints
from trjax.run.display import Display
from trjax.run.profile import Profiler
from trjax.run.records import Meter, Record, Split, append_metrics, make_record
from trjax.step.optim import make_learning_rates
from trjax.step.program import Program
from trjax.step.state import TrainState


@dataclass(frozen=True)
class RunSetup:
    """A run whose options and data are checked, with the state that it starts from.

    Attributes:
        config: the options.
        workdir: the run's folder; process 0 alone writes to it.
        program: the train step and the evaluation.
        train_source: examples to learn from.
        test_source: examples to be tested on.
        checkpoints: of the run; None on all processes but the first.
        state: the initial state, or that of the last checkpoint.
        step: the number of steps after which the state was saved.
        evaluated: the state has been evaluated, if its step is the last one of an epoch.
    """

    config: Config
    workdir: Path
    program: Program
    train_source: Source
    test_source: Source
    checkpoints: Checkpoints | None
    state: TrainState
    step: int
    evaluated: bool


@dataclass(frozen=True)
class RunContext(RunSetup):
    """A run with a compiled program, and all that its loop uses.

    Attributes:
        display: for the console.
        board: for TensorBoard.
        started: when, `time.perf_counter`.
        interrupted: tells whether this process is to stop.
        report_step: tells the watchdog that a step has finished.
        profiler: of some of the steps.
    """

    display: Display
    board: Callable[[Record], None]
    started: float
    interrupted: Callable[[], bool]
    report_step: Callable[[int], None]
    profiler: Profiler

    @cached_property
    def alone(self) -> bool:
        """There is no other process."""
        return jax.process_count() == 1

    @cached_property
    def learning_rates(self) -> np.ndarray:
        """Those of every update, float32."""
        config = self.config
        return make_learning_rates(config.optim, config.epochs, self.program.steps_per_epoch, config.global_batch)

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
