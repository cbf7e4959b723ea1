"""`python -m trjax.train`: from a command line to a trained model."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, TextIO

import jax
import optax
import tyro
from jax.sharding import Mesh

from trjax.chain import Chain
from trjax.compilation import compile_program, needed_bytes
from trjax.config import Config
from trjax.data.sources import resolve
from trjax.evaluation import evaluate_run
from trjax.explain_step import dry_run
from trjax.interrupts import STOPPED, catch_interrupts
from trjax.loop import BadNumbersError, run_loop
from trjax.memory import device_bytes, keep_freed
from trjax.mesh import choose_platform
from trjax.optim import make_learning_rates
from trjax.options import probe_options
from trjax.presets import parse_options
from trjax.processes import Processes, announce_failure, exchange, join_processes, leave, process_index
from trjax.profiling import Profiler
from trjax.progress import Run
from trjax.records import Display, open_board, open_display
from trjax.replay import format_findings, replay
from trjax.sizes import SMALLER
from trjax.start import Start, start_run
from trjax.watchdog import watch

FILES, MISTAKE, BAD_NUMBERS = 1, 2, 3


class OutOfDeviceMemoryError(Exception):
    """A device has less memory than a run needs."""


@dataclass(frozen=True)
class Options:
    """What a process is told beside its run."""

    processes: Annotated[Processes, tyro.conf.arg(name="")] = field(default_factory=Processes)
    replay_step: bool = False
    """Do the step again at which the run in --workdir gave up, op by op on the CPU, and say where it goes wrong."""
    eval_only: bool = False
    """Evaluate the last checkpoint of the run in --workdir, and do nothing else."""
    dry_run: bool = False
    """Print the options, the plan and what the step compiles to on these devices, and stop before the first step."""


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


@contextmanager
def _tell_memory(mesh: Mesh, needed: Sequence[int]) -> Iterator[None]:
    """Says what to do where a device runs out of memory, and how many bytes the step needs once that is known."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        what = f"the step needs {needed[0] / 1e9:.2f} GB on each device" if needed else "compiling needs more than"
        there = f"{', which has' if needed else ' each device has,'} {device_bytes(mesh) / 1e9:.2f} GB"
        raise OutOfDeviceMemoryError(f"out of memory: {what}{there}; {SMALLER}") from error


def _train(
    config: Config, start: Start, display: Display, interrupted: Callable[[], bool], started: float
) -> tuple[int, bool]:
    """Compiles and trains, and returns the step at which the run is then, and whether that has been evaluated."""
    program = start.program
    if dropped := probe_options(program.mesh, config.deterministic).dropped:
        display.say(f"compile options that this jax does not know, left out: {', '.join(dropped)}")
    display.say("compiling ...")
    rates = make_learning_rates(config.optim, config.epochs, program.steps_per_epoch, config.global_batch)
    process, alone = process_index(), jax.process_count() == 1
    board = start.workdir / "tensorboard" if config.tensorboard and start.checkpoints else None
    needed = list[int]()
    with ExitStack() as leaving:
        maker = ThreadPoolExecutor(1, "compile")
        leaving.callback(maker.shutdown, cancel_futures=True)
        sizes = config.data.sizes_from(start.step // program.steps_per_epoch)
        leaving.enter_context(_tell_memory(program.mesh, needed))
        compiled = compile_program(program, sizes, maker, config.steps_per_dispatch)
        needed.append(needed_bytes(compiled.train_step))
        exchange("compiled", "")  # one process may take longer than others, and that is no step that hangs
        log = start.workdir / f"watchdog{process}.log"
        profiled = config.profiled if start.checkpoints else (0, 0)
        profiler = Profiler(profiled, start.workdir / "profile", display.say)
        leaving.callback(profiler.close)
        run = Run(
            config=config,
            workdir=start.workdir,
            program=compiled,
            train_source=start.train_source,
            test_source=start.test_source,
            learning_rates=rates,
            checkpoints=start.checkpoints,
            display=display,
            board=leaving.enter_context(open_board(board, start.step)),
            started=started,
            interrupted=interrupted,
            alone=alone,
            fed=leaving.enter_context(watch(config.watchdog_seconds, process, log)),
            profiler=profiler,
        )
        return run_loop(run, start.state, start.step, start.evaluated)


def train(
    config: Config,
    chain: Chain | None = None,
    optimizer: optax.GradientTransformation | None = None,
    processes: Processes = Processes(),  # noqa: B008
) -> Summary:
    """Trains a run, or goes on with the one in `config.workdir`, to its end or an interrupt.

    Args:
        config: the run.
        chain: a model of one's own in place of the configured ResNet.
        optimizer: one's own, for a learning rate of one, in place of the configured one.
        processes: how to find the other processes of the run.

    Raises:
        ValueError: something the user gave cannot be; says what, the rule and the remedy.
        BadNumbersError: gradients were not finite, too often.
        OSError: the run's folder can no longer be written to.
        OutOfDeviceMemoryError: the step does not fit; says what it needs.
    """
    started, warnings, ready = time.perf_counter(), list[str](), False
    config = replace(config, data=resolve(config.data))
    join_processes(processes)
    try:
        with (
            catch_interrupts() as interrupted,
            start_run(config, chain, optimizer, warnings.append) as start,
            open_display(config.epochs, start.program.steps_per_epoch, start.step, process_index() > 0) as display,
        ):
            ready = True
            mesh, end_step = start.program.mesh, start.program.num_steps
            devices = f"{mesh.size} {mesh.devices.flat[0].device_kind} device{'s' if mesh.size > 1 else ''}"
            examples = f"{len(start.train_source)} training and {len(start.test_source)} test examples"
            display.say(f"{config.data.source}: {examples}, {devices}, {start.workdir}")
            for warning in warnings:
                display.say(f"warning: {warning}")
            if start.step:
                display.say(f"resumed at step {start.step} of {end_step}")
            step, evaluated = start.step, start.evaluated
            if step < end_step or not evaluated:
                step, evaluated = _train(config, start, display, interrupted, started)
            last = start.checkpoints.last if start.checkpoints else None
            best = start.checkpoints.best if start.checkpoints else None
    except (ValueError, OSError) as error:
        if not ready:
            announce_failure(str(error))
        raise
    return Summary(
        step == end_step and evaluated,
        step,
        last.test_top1 if last else None,
        (best.step, best.test_top1) if best and best.test_top1 is not None else None,
        start.workdir,
        time.perf_counter() - started,
    )


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


def _tell(text: str, file: TextIO) -> None:
    """Prints; where nobody reads any more, nothing happens, now or when the process ends."""
    try:
        print(text, file=file, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code.

    0 finished; 1 trouble with files, or another process is gone; 2 a mistake; 3 numbers that are not finite;
    4 nothing moved any more (`watchdog.HUNG`); 130 stopped by a signal, with a checkpoint to go on from.
    """
    try:
        config, own = parse_options(arguments, "python -m trjax.train", "Train a ResNet, data-parallel.", Options())
        if own.replay_step + own.eval_only + own.dry_run > 1:
            raise ValueError("--replay-step, --eval-only and --dry-run: each does nothing else; pass one of them")
        if own.replay_step:
            _tell(format_findings(replay(config)), sys.stdout)
            return 0
        if own.eval_only:
            _tell("\n".join(evaluate_run(config)), sys.stdout)
            return 0
        if own.dry_run:
            return dry_run(config)
        if choose_platform(config.platform) == "cpu":
            keep_freed()  # before there is another thread, with an arena of its own
        summary = train(config, processes=own.processes)
    except ValueError as error:
        _tell(f"error: {error}", sys.stderr)
        return MISTAKE
    except BadNumbersError as error:
        _tell(f"error: {error}", sys.stderr)
        return BAD_NUMBERS
    except (OSError, jax.errors.JaxRuntimeError, OutOfDeviceMemoryError) as error:
        # A full disk, a folder or a process that went away, a device that is too small.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        _tell(f"error: {reason}; checkpoints are as they were", sys.stderr)
        return FILES
    except KeyboardInterrupt:
        _tell("stopped before the first step: nothing to save", sys.stderr)
        return STOPPED
    if process_index() == 0:
        _tell(format_summary(summary), sys.stdout)
    return 0 if summary.finished else STOPPED


if __name__ == "__main__":
    code = main(sys.argv[1:])
    leave(code)
    sys.exit(code)
