"""`python -m trjax.launch --processes 2 -- TRAIN ARGUMENTS`: several processes of one run on this machine."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Annotated

from pydantic import Field

from trjax.commands import read_options
from trjax.config.checks import Checked
from trjax.run.signals import STOPPED

_GRACE_SECONDS = 60  # for the others to end by themselves, once one has failed
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2), Linux


@dataclass(frozen=True)
class LaunchOptions(Checked):
    """Run `python -m trjax.train` as several processes on this machine; its arguments follow after `--`."""

    processes: Annotated[int, Field(ge=1, le=1024)] = 2
    """Number of processes."""
    gpus_per_process: Annotated[int, Field(ge=0, le=1024)] = 0
    """GPUs of each process, in order; 0: all processes see all devices. For CPU devices, pass --devices to train."""


def free_port() -> int:
    """Returns a port of this machine at which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _die_with_parent() -> None:
    """Has the kernel send SIGTERM to this process when its parent is gone: it stops, with a checkpoint."""
    with suppress(OSError, AttributeError):  # no Linux
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _start(options: LaunchOptions, index: int, port: int, arguments: Sequence[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if options.gpus_per_process:
        own = range(index * options.gpus_per_process, (index + 1) * options.gpus_per_process)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, own))
    found_by = ["--coordinator", f"127.0.0.1:{port}"]
    found_by += ["--num-processes", str(options.processes), "--process-id", str(index)]
    return subprocess.Popen(
        [sys.executable, "-m", "trjax.train", *arguments, *found_by],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )


def _prefix(index: int, lines: IO[str] | None) -> None:
    for line in lines or ():
        with suppress(OSError):  # nobody reads it any more; the processes go on
            print(f"[{index}] {line}", end="", flush=True)


def _wait(children: Sequence[subprocess.Popen[str]]) -> int:
    """Returns the exit code of the first process that failed, 0 if none did, when all have ended."""
    first, deadline = 0, float("inf")
    while True:
        codes = [child.poll() for child in children]
        failed = [(index, code) for index, code in enumerate(codes) if code]
        if failed and not first:
            (index, first), deadline = failed[0], time.monotonic() + _GRACE_SECONDS
            if first != STOPPED:
                how = f"by {signal.Signals(-first).name}" if first < 0 else f"with exit code {first}"
                print(f"process {index} was the first to end, {how}", file=sys.stderr)
        if None not in codes:
            return first
        if time.monotonic() > deadline:
            for child in children:
                child.kill()
        time.sleep(0.05)


def launch(options: LaunchOptions, arguments: Sequence[str]) -> int:
    """Runs the processes and returns the exit code of the first that failed, or 0; SIGINT and SIGTERM go to all."""
    children: list[subprocess.Popen[str]] = []

    def forward_signal(number: int, _frame: object) -> None:
        for child in children:
            with suppress(ProcessLookupError):
                child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward_signal)
    port = free_port()
    for index in range(options.processes):
        children.append(_start(options, index, port, arguments))
    with ThreadPoolExecutor(options.processes) as readers:
        readers.map(_prefix, range(options.processes), [child.stdout for child in children])
        code = _wait(children)
    return 128 - code if code < 0 else code  # as a shell reports a signal


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    try:
        return launch(read_options("python -m trjax.launch", LaunchOptions, arguments[:split]), arguments[split + 1 :])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
