"""`python -m trjax.train`: the loop, from a configuration to a trained model."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax

from trjax.chain import Chain
from trjax.checkpoint import Checkpoints, open_checkpoints, restore, save
from trjax.config import Config
from trjax.data.batches import count_batches, eval_batches, train_batches
from trjax.data.sources import Source, load
from trjax.mesh import make_mesh, start_platform
from trjax.optim import make_learning_rates
from trjax.options import probe_options
from trjax.presets import parse_config
from trjax.program import Program, compile_program, make_program
from trjax.records import Display, Meter, Record, append_metrics, make_record, open_display, trim_metrics
from trjax.state import TrainState
from trjax.step import init_totals
from trjax.workdir import open_workdir, write_config


@dataclass(frozen=True)
class Summary:
    """How a run ended.

    Attributes:
        finished: all epochs are done; False after an interrupt.
        step: updates done.
        last_top1: test top-1 of the last checkpoint; None if it was made inside an epoch.
        best: step and test top-1 of the best checkpoint; None before the first evaluation.
        workdir: the run's folder.
        seconds: that this process took.
    """

    finished: bool
    step: int
    last_top1: float | None
    best: tuple[int, float] | None
    workdir: Path
    seconds: float


@dataclass(frozen=True)
class Run:
    """What the loop needs and never changes."""

    config: Config
    workdir: Path
    program: Program
    train_source: Source
    test_source: Source
    learning_rates: np.ndarray
    steps_per_epoch: int
    checkpoints: Checkpoints
    display: Display
    started: float
    interrupted: Callable[[], bool]

    def record(self, split: Literal["train", "test"], meter: Meter, step: int) -> Record:
        """Writes what the meter has gathered to the file and the console, and empties it."""
        record = make_record(
            split,
            meter.totals,
            epoch=(step - 1) // self.steps_per_epoch + 1,
            step=step,
            learning_rate=float(f"{self.learning_rates[step - 1]:.7g}"),  # float32 has no more digits
            images_per_second=meter.images_per_second,
            seconds=time.perf_counter() - self.started,
        )
        meter.restart()
        append_metrics(self.workdir / "metrics.jsonl", record)
        self.display.record(record)
        return record


def _train_epoch(run: Run, state: TrainState, end_step: int) -> TrainState:
    """Trains up to `end_step` or an interrupt; results are read one step late, so that the devices never wait."""
    config, meter, start_step = run.config, Meter(), int(state.step)

    def settle(step: int, results: jax.Array) -> None:
        meter.add(np.asarray(results, np.float64))
        run.display.advance(step, (step - 1) // run.steps_per_epoch + 1, np.asarray(results), meter.images_per_second)
        if step % config.log_every == 0:
            run.record("train", meter, step)

    previous: tuple[int, jax.Array] | None = None
    batches = train_batches(run.train_source, config.global_batch, config.seed, start_step, end_step, config.last_batch)
    for step, batch in enumerate(batches, start=start_step):
        epoch = np.int32(step // run.steps_per_epoch)
        state, results = run.program.train_step(state, run.program.place_train(batch), run.learning_rates[step], epoch)
        if previous:
            settle(*previous)
        previous = (step + 1, results)
        if run.interrupted():
            break
    if previous:
        settle(*previous)
        if meter.examples:
            run.record("train", meter, previous[0])
    return state


def _evaluate(run: Run, state: TrainState) -> float:
    """Evaluates every test example once, writes the record, and returns top-1."""
    meter = Meter()
    totals = init_totals(run.program.mesh)
    for batch in eval_batches(run.test_source, run.config.global_batch):
        totals = run.program.accumulate(totals, state.params, state.batch_stats, run.program.place(batch))
    meter.add(np.asarray(run.program.reduce_totals(totals), np.float64))
    return run.record("test", meter, int(state.step)).top1


def _loop(run: Run, state: TrainState) -> TrainState:
    """Trains epoch by epoch, evaluates and saves after each, until the end or an interrupt."""
    end_step = len(run.learning_rates)
    while (step := int(state.step)) < end_step and not run.interrupted():
        epoch_end = (step // run.steps_per_epoch + 1) * run.steps_per_epoch
        state = _train_epoch(run, state, epoch_end)
        step = int(state.step)
        top1 = _evaluate(run, state) if step == epoch_end else None
        position = {"epoch": step // run.steps_per_epoch, "batch": step % run.steps_per_epoch}
        save(run.checkpoints, run.program.forms.unload(state), position, asdict(run.config), top1)
    return state


@contextmanager
def _catch_interrupts() -> Iterator[Callable[[], bool]]:
    """Turns the first SIGINT or SIGTERM into a flag; a second one ends the process at once."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag.is_set
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, _frame: Any) -> None:
        flag.set()
        signal.signal(number, signal.SIG_DFL)
        os.write(sys.stderr.fileno(), b"\nstopping after this step, with a checkpoint; again to stop at once\n")

    for number in handlers:
        signal.signal(number, stop)
    try:
        yield flag.is_set
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _start(config: Config, workdir: Path, program: Program, steps_per_epoch: int) -> tuple[Checkpoints, TrainState]:
    """Opens the checkpoints and returns the state to go on from, a fresh one if there is none."""
    checkpoints = open_checkpoints(workdir / "checkpoints")
    if checkpoints.last_step is None:
        return checkpoints, program.init()
    saved, position = restore(checkpoints, program.forms.saved_shape, program.mesh, program.forms.saved_formats)
    state = program.forms.load(saved)
    step = int(state.step)
    if (position["epoch"], position["batch"]) != divmod(step, steps_per_epoch):
        raise ValueError(
            f"{workdir} stopped at batch {position['batch']} of epoch {position['epoch'] + 1}, which is not "
            f"step {step} of the data given now: the training set has another size"
        )
    if step > config.epochs * steps_per_epoch:
        raise ValueError(f"epochs={config.epochs} end before step {step}, where {workdir} is; pass more --epochs")
    return checkpoints, state


def train(config: Config, chain: Chain | None = None, optimizer: optax.GradientTransformation | None = None) -> Summary:
    """Trains a run, or goes on with the one in `config.workdir`, to its end or an interrupt.

    Args:
        config: the run.
        chain: a model of one's own in place of the configured ResNet.
        optimizer: one's own, for a learning rate of one, in place of the configured one.

    Raises:
        ValueError: something the user gave cannot be; says what, the rule and the remedy.
    """
    started = time.perf_counter()
    start_platform(config.platform, config.devices, config.nccl)
    mesh = make_mesh(config.devices, config.hosts)
    program = make_program(config, mesh, chain, optimizer)
    train_source, test_source = load(config.data)
    steps_per_epoch = count_batches(len(train_source), config.global_batch, config.last_batch)
    workdir = open_workdir(config)
    checkpoints, state = _start(config, workdir, program, steps_per_epoch)
    write_config(config, workdir)
    start_step, end_step = int(state.step), config.epochs * steps_per_epoch
    trim_metrics(workdir / "metrics.jsonl", start_step)
    with open_display(config.epochs, steps_per_epoch, start_step) as display:
        devices = f"{mesh.size} {mesh.devices.flat[0].device_kind} device{'s' if mesh.size > 1 else ''}"
        examples = f"{len(train_source)} training and {len(test_source)} test examples"
        display.say(f"{config.preset}: {examples}, {devices}, {workdir}")
        if start_step:
            display.say(f"resumed at step {start_step} of {end_step}")
        if start_step < end_step:
            if dropped := probe_options(mesh).dropped:
                display.say(f"compile options that this jax does not know, left out: {', '.join(dropped)}")
            display.say("compiling ...")
            rates = make_learning_rates(config.optim, config.epochs, steps_per_epoch, config.global_batch)
            compiled = compile_program(program)
            with _catch_interrupts() as interrupted:
                run = Run(
                    config, workdir, compiled, train_source, test_source, rates, steps_per_epoch, checkpoints, display,
                    started, interrupted,
                )  # fmt: skip
                state = _loop(run, state)
    step, last = int(state.step), checkpoints.top1(checkpoints.last_step)
    return Summary(step == end_step, step, last, checkpoints.best, workdir, time.perf_counter() - started)


def format_summary(summary: Summary) -> str:
    """Returns what to tell the user at the end."""
    lines = [f"{'finished' if summary.finished else 'stopped'} at step {summary.step} after {summary.seconds:.0f} s"]
    if summary.last_top1 is not None:
        lines.append(f"last test top-1 {summary.last_top1:.2%}")
    if summary.best is not None:
        lines.append(f"best test top-1 {summary.best[1]:.2%} at step {summary.best[0]}")
    lines.append(f"checkpoints in {summary.workdir / 'checkpoints'}")
    if not summary.finished:
        lines.append(f"resume with: python -m trjax.train --workdir {summary.workdir}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code: 0 finished, 1 file trouble, 2 a mistake, 130 interrupted."""
    try:
        summary = train(parse_config(arguments, "python -m trjax.train", "Train a ResNet, data-parallel."))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a folder that went away
        print(f"error: {error}; the last checkpoint is as it was", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped before the first step: nothing to save", file=sys.stderr)
        return 130
    print(format_summary(summary))
    return 0 if summary.finished else 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
