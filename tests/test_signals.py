import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from trjax.run.signals import STOPPED, catch_interrupts

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_to_stop(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with catch_interrupts() as asked:
        assert not asked()
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 10
        while not asked() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert asked()
    assert signal.getsignal(number) is before
    assert "again to stop at once" in capfd.readouterr().err


def test_the_second_ends_the_process_while_the_main_thread_is_in_native_code() -> None:
    """As in a compilation: no line of Python runs in the main thread between the two."""
    code = (
        "import os, signal, time, threading; from trjax.run.signals import catch_interrupts\n"
        "import hashlib\n"
        "def later():\n"
        "    for _ in range(2): time.sleep(0.3); os.kill(os.getpid(), signal.SIGTERM)\n"
        "with catch_interrupts() as asked:\n"
        "    threading.Thread(target=later, daemon=True).start()\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**30)\n"  # minutes, without the interpreter's lock
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True)
    assert done.returncode == STOPPED


def test_nothing_comes_outside_the_main_thread() -> None:
    found = []

    def run() -> None:
        with catch_interrupts() as asked:
            found.append(asked())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False]
