import subprocess
import sys
import time
from pathlib import Path

import pytest

from trjax.run.watchdog import HUNG, watch

pytestmark = pytest.mark.fast

CODE = """
import sys, time
from pathlib import Path
from trjax.run.watchdog import watch

def stuck():
    time.sleep(60)

with watch(0.5, 3, Path("watchdog.log")) as report_step:
    for step in range(4):
        time.sleep(0.3)
        report_step(step)
    stuck()
"""


def test_a_process_that_hangs_ends_with_every_stack() -> None:
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", CODE], timeout=60, capture_output=True, text=True)
    assert time.monotonic() - start < 30
    assert done.returncode == HUNG
    for text in (done.stderr, Path("watchdog.log").read_text()):
        assert "process 3 has finished no step for 0.5 s, the last was step 3" in text
        assert "in stuck" in text


def test_faulthandler_names_neither_process_nor_step() -> None:
    code = "import faulthandler, time; faulthandler.dump_traceback_later(0.2, exit=True); time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode == 1 != HUNG
    assert "Timeout" in done.stderr
    assert "process" not in done.stderr
    assert "step" not in done.stderr


def test_it_lets_go_of_a_run_that_ends_and_of_one_without_it(tmp_path: Path) -> None:
    for seconds in (0.0, 60.0):
        with watch(seconds, 0, tmp_path / "log") as report_step:
            report_step(1)
    assert not (tmp_path / "log").exists()
