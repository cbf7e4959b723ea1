"""A watchdog: a process that finishes no step for too long ends, so that no other process waits for it forever."""

import faulthandler
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# faulthandler.dump_traceback_later(exit=True) names neither process nor step, and exits with 1 as any error does.
HUNG = 4
"""Exit code of a run that its watchdog ended."""
_WRITE_SECONDS = 10  # for the message: the log may lie on the file system that hangs


def _write_stacks(text: str, log: Path) -> None:
    """Writes the text and the stack of every thread to stderr and to the log, if each can be written."""
    with suppress(OSError):
        os.write(2, text.encode())
        faulthandler.dump_traceback(file=2)
    with suppress(OSError), log.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        faulthandler.dump_traceback(file=file)


@contextmanager
def watch(seconds: float, process: int, log: Path) -> Iterator[Callable[[int], None]]:
    """Gives a function that reports a finished step; if none is reported for too long, the process ends.

    Args:
        seconds: the longest time without a step; 0 waits forever.
        process: this one's index, for the message.
        log: gets the message and the stack of every thread, as stderr does.
    """
    if not seconds:
        yield lambda step: None
        return
    steps = queue.SimpleQueue[int | None]()

    def wait_for_steps() -> None:
        last: int | None = -1
        try:
            while (step := steps.get(timeout=seconds)) is not None:
                last = step
        except queue.Empty:
            text = (
                f"watchdog: process {process} has finished no step for {seconds:g} s, the last was step {last}; "
                "it ends now. The stack of every thread:\n"
            )
            writer = threading.Thread(target=_write_stacks, args=(text, log), daemon=True)
            writer.start()
            writer.join(_WRITE_SECONDS)
            os._exit(HUNG)

    thread = threading.Thread(target=wait_for_steps, name="watchdog", daemon=True)
    thread.start()
    try:
        yield steps.put
    finally:
        steps.put(None)
        thread.join()
