"""From a configuration to a trained model: `fit` trains a run to its end, or resumes it."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import optax
from jax.sharding import Mesh

from trjax.config.run import Config
from trjax.data.sources import resolve
from trjax.memory import device_bytes
from trjax.models.chain import Chain
from trjax.run.context import RunContext, RunSetup
from trjax.run.display import Display, open_display
from trjax.run.loop import run_loop
from trjax.run.processes import Processes, exchange, join_processes, process_index, report_failure
from trjax.run.profile import Profiler
from trjax.run.records import open_board
from trjax.run.setup import set_up_run
from trjax.run.signals import catch_interrupts
from trjax.run.watchdog import watch
from trjax.step.compile import compile_program, needed_bytes
from trjax.step.limits import SMALLER
from trjax.step.options import probe_options


class OutOfDeviceMemoryError(Exception):
    """A device has less memory than a run needs."""


@dataclass(frozen=True)
class RunSummary:
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
def _report_memory(mesh: Mesh, needed: Sequence[int]) -> Iterator[None]:
    """Says what to do if a device runs out of memory, and how many bytes the step needs once that is known."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        what = f"the step needs {needed[0] / 1e9:.2f} GB on each device" if needed else "compiling needs more than"
        there = f"{', which has' if needed else ' each device has,'} {device_bytes(mesh) / 1e9:.2f} GB"
        raise OutOfDeviceMemoryError(f"out of memory: {what}{there}; {SMALLER}") from error


def _fit(setup: RunSetup, display: Display, interrupted: Callable[[], bool], started: float) -> tuple[int, bool]:
    """Compiles and trains; returns the number of steps done, and whether the last epoch's evaluation has been done."""
    config, program = setup.config, setup.program
    if dropped := probe_options(program.mesh, config.deterministic).dropped:
        display.say(f"compile options that this jax does not know, left out: {', '.join(dropped)}")
    display.say("compiling ...")
    board = setup.workdir / "tensorboard" if config.tensorboard and setup.checkpoints else None
    log = setup.workdir / f"watchdog{process_index()}.log"
    needed: list[int] = []
    with ExitStack() as leaving:
        maker = ThreadPoolExecutor(1, "compile")
        leaving.callback(maker.shutdown, cancel_futures=True)
        sizes = config.data.sizes_from(setup.step // program.steps_per_epoch)
        leaving.enter_context(_report_memory(program.mesh, needed))
        compiled = compile_program(program, sizes, maker, config.steps_per_dispatch)
        needed.append(needed_bytes(compiled.train_step))
        exchange("compiled", "")  # one process may take longer than others, and that is no step that hangs
        profiler = Profiler(config.profiled if setup.checkpoints else (0, 0), setup.workdir / "profile", display.say)
        leaving.callback(profiler.close)
        run = RunContext(
            **vars(replace(setup, program=compiled)),
            display=display,
            board=leaving.enter_context(open_board(board, setup.step)),
            started=started,
            interrupted=interrupted,
            report_step=leaving.enter_context(watch(config.watchdog_seconds, process_index(), log)),
            profiler=profiler,
        )
        return run_loop(run)


def fit(
    config: Config,
    chain: Chain | None = None,
    optimizer: optax.GradientTransformation | None = None,
    processes: Processes = Processes(),  # noqa: B008
) -> RunSummary:
    """Trains a run, or resumes the one in `config.workdir`, to its end or an interrupt.

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
            set_up_run(config, chain, optimizer, warnings.append) as setup,
            open_display(config.epochs, setup.program.steps_per_epoch, setup.step, process_index() > 0) as display,
        ):
            ready = True
            mesh, end_step = setup.program.mesh, setup.program.num_steps
            devices = f"{mesh.size} {mesh.devices.flat[0].device_kind} device{'s' if mesh.size > 1 else ''}"
            examples = f"{len(setup.train_source)} training and {len(setup.test_source)} test examples"
            display.say(f"{config.data.source}: {examples}, {devices}, {setup.workdir}")
            for warning in warnings:
                display.say(f"warning: {warning}")
            if setup.step:
                display.say(f"resumed at step {setup.step} of {end_step}")
            step, evaluated = setup.step, setup.evaluated
            if step < end_step or not evaluated:
                step, evaluated = _fit(setup, display, interrupted, started)
            last = setup.checkpoints.last if setup.checkpoints else None
            best = setup.checkpoints.best if setup.checkpoints else None
    except (ValueError, OSError) as error:
        if not ready:
            report_failure(str(error))
        raise
    return RunSummary(
        step == end_step and evaluated,
        step,
        last.test_top1 if last else None,
        (best.step, best.test_top1) if best and best.test_top1 is not None else None,
        setup.workdir,
        time.perf_counter() - started,
    )


def format_summary(summary: RunSummary) -> str:
    """Returns the lines that report how a run ended."""
    lines = [f"{'finished' if summary.finished else 'stopped'} at step {summary.step} after {summary.seconds:.0f} s"]
    if summary.last_top1 is not None:
        lines.append(f"last test top-1 {summary.last_top1:.2%}")
    if summary.best is not None:
        lines.append(f"best test top-1 {summary.best[1]:.2%} at step {summary.best[0]}")
    lines.append(f"checkpoints in {summary.workdir / 'checkpoints'}")
    if not summary.finished:
        lines.append(f"resume with: python -m trjax.train --workdir {summary.workdir}")
    return "\n".join(lines)
