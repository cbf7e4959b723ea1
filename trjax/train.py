"""`python -m trjax.train`: from a command line to a trained model."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TextIO

import jax
import tyro

from trjax.config.command_line import parse_options
from trjax.explain.step import dry_run
from trjax.memory import keep_freed
from trjax.mesh import choose_platform
from trjax.moved import warn_of_move
from trjax.run.fit import OutOfDeviceMemoryError, fit, format_summary
from trjax.run.loop import BadNumbersError
from trjax.run.processes import Processes, leave, process_index
from trjax.run.replay import format_findings, replay
from trjax.run.saved_model import evaluate_run
from trjax.run.signals import STOPPED

FILES, MISTAKE, BAD_NUMBERS = 1, 2, 3


@dataclass(frozen=True)
class TrainOptions:
    """Options of the command that are no options of the run."""

    processes: Annotated[Processes, tyro.conf.arg(name="")] = field(default_factory=Processes)
    replay_step: bool = False
    """Repeat the step at which the run in --workdir gave up, op by op on the CPU, and report where it goes wrong."""
    eval_only: bool = False
    """Evaluate the last checkpoint of the run in --workdir, and do nothing else."""
    dry_run: bool = False
    """Print the options, the plan and what the step compiles to on these devices, and stop before the first step."""


def train(*arguments: Any, **named: Any) -> Any:
    """Calls `trjax.fit`, the new name of this function."""
    warn_of_move("trjax.train.train", "trjax.fit")
    return fit(*arguments, **named)


def _report(text: str, file: TextIO) -> None:
    """Prints; if the reader of the output is gone, drops the text, and all that the process prints later."""
    try:
        print(text, file=file, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code.

    0 finished; 1 trouble with files, or another process is gone; 2 a mistake; 3 numbers that are not finite;
    4 no step finished for too long (`watchdog.HUNG`); 130 stopped by a signal, with a checkpoint to resume from.
    """
    try:
        prog, purpose = "python -m trjax.train", "Train a ResNet, data-parallel."
        config, own = parse_options(arguments, prog, purpose, TrainOptions())
        if own.replay_step + own.eval_only + own.dry_run > 1:
            raise ValueError("--replay-step, --eval-only and --dry-run: each does nothing else; pass one of them")
        if own.replay_step:
            _report(format_findings(replay(config)), sys.stdout)
            return 0
        if own.eval_only:
            _report("\n".join(evaluate_run(config)), sys.stdout)
            return 0
        if own.dry_run:
            return dry_run(config)
        if choose_platform(config.platform) == "cpu":
            keep_freed()  # before there is another thread, with an arena of its own
        summary = fit(config, processes=own.processes)
    except (ValueError, BadNumbersError) as error:
        _report(f"error: {error}", sys.stderr)
        return MISTAKE if isinstance(error, ValueError) else BAD_NUMBERS
    except (OSError, jax.errors.JaxRuntimeError, OutOfDeviceMemoryError) as error:
        # A full disk, a folder or a process that went away, a device that is too small.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        _report(f"error: {reason}; checkpoints are as they were", sys.stderr)
        return FILES
    except KeyboardInterrupt:
        _report("stopped before the first step: nothing to save", sys.stderr)
        return STOPPED
    if process_index() == 0:
        _report(format_summary(summary), sys.stdout)
    return 0 if summary.finished else STOPPED


if __name__ == "__main__":
    code = main(sys.argv[1:])
    leave(code)
    sys.exit(code)
