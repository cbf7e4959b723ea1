"""SIGINT and SIGTERM: the first asks to stop, the second ends the process."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

STOPPED = 130
"""Exit code of a run that a signal stopped: there is a checkpoint to go on from."""
_MESSAGE = b"\nstopping after this step, with a checkpoint; again to stop at once\n"


@contextmanager
def catch_interrupts() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether SIGINT or SIGTERM has come; a second one ends the process at once.

    A thread of its own takes the signals, so that the second is answered also while the main thread compiles,
    evaluates or saves. Outside the main thread, where Python handles no signals, none ever comes.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    numbers = (signal.SIGINT, signal.SIGTERM)

    def answer() -> None:
        while number := reader.recv(1):
            if number[0] not in numbers:
                continue
            if asked.is_set():
                os._exit(STOPPED)
            asked.set()
            with suppress(OSError):  # nobody reads it any more
                os.write(2, _MESSAGE)

    thread = threading.Thread(target=answer, name="interrupts", daemon=True)
    thread.start()
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield asked.is_set
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        writer.close()
        thread.join()
        reader.close()
