"""The end of a run that hangs: no process waits for ever for one that is stuck."""

import faulthandler
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# faulthandler.dump_traceback_later(exit=True) names neither process nor step, and exits with 1 as any error does.
HUNG = 4
"""Exit code of a run that its watchdog ended."""
_BARK_SECONDS = 10  # for the message: the log may lie on what hangs


def _bark(text: str, log: Path) -> None:
    """Writes the text and the stack of every thread to stderr and to the log; neither may be there any more."""
    with suppress(OSError):
        os.write(2, text.encode())
        faulthandler.dump_traceback(file=2)
    with suppress(OSError), log.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        faulthandler.dump_traceback(file=file)


@contextmanager
def watch(seconds: float, process: int, log: Path) -> Iterator[Callable[[int], None]]:
    """Gives a function to be told of every step that is done; the process ends if it hears of none for too long.

    Args:
        seconds: without a step; 0 waits for ever.
        process: this one's index, for the message.
        log: gets the message and the stack of every thread, as stderr does.
    """
    fed, last = threading.Event(), -1
    ended = threading.Event()

    def feed(step: int) -> None:
        nonlocal last
        last = step
        fed.set()

    def guard() -> None:
        while fed.wait(seconds):
            fed.clear()
            if ended.is_set():
                return
        text = (
            f"watchdog: process {process} has finished no step for {seconds:g} s, the last was step {last}; "
            "it ends now. The stack of every thread:\n"
        )
        bark = threading.Thread(target=_bark, args=(text, log), daemon=True)
        bark.start()
        bark.join(_BARK_SECONDS)
        os._exit(HUNG)

    if not seconds:
        yield feed
        return
    thread = threading.Thread(target=guard, name="watchdog", daemon=True)
    thread.start()
    try:
        yield feed
    finally:
        ended.set()
        fed.set()
        thread.join()
