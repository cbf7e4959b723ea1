"""The check of predictions against devices: what it reads from a profile, and a quick run on CPU devices."""

import csv
import os
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers import GPU_PROFILE
from jax.profiler import ProfileData

from trjax.run.profile import UNNAMED, Event, Trace, read_trace

SCRIPT = Path(__file__).parents[1] / "experiments" / "check_gpu.py"
CHECK = runpy.run_path(str(SCRIPT))


def summarise_gpu_profile(num_steps: int) -> Any:
    trace = read_trace(ProfileData.from_text_proto(GPU_PROFILE), {"all-reduce-start.1": "deep"})
    return CHECK["summarise"](trace, num_steps)


def test_gpu_profile() -> None:
    figures, gaps_us, orders = summarise_gpu_profile(1)
    # Busy: 0 to 6, 9 to 10 and 12 to 14 us. Reducing and not computing: 4 to 6 and 12 to 14 us.
    expected = {
        "kernels and copies": 2,
        "busy ms": 9e-3,
        "gaps ms": 5e-3,
        "AllReduces": 2,
        "exposed AllReduce ms": 4e-3,
    }
    expected |= {"AllReduces": 2, "CUDA graph launches": 2, "CUDA graph updates": 1, "launches in CUDA graphs": 2}
    assert figures == pytest.approx(expected)
    assert gaps_us == pytest.approx([3, 2])
    assert orders == [["deep", UNNAMED]]


def test_figures_are_those_of_one_step() -> None:
    once, twice = summarise_gpu_profile(1), summarise_gpu_profile(2)
    assert twice[0] == pytest.approx({what: value / 2 for what, value in once[0].items()})
    assert twice[1:] == once[1:]


def test_cpu_profile_has_the_devices_apart() -> None:
    seen = (0, 0, ""), (1, 1, ""), (0, 4, "deep"), (1, 3, "deep"), (0, 6, "first"), (1, 9, "first")
    events = [Event(device, start, start + 2, group, group) for device, start, group in seen]
    figures, gaps_us, orders = CHECK["summarise"](Trace(tuple(events), Counter(), ()), 1)
    assert (figures["kernels and copies"], figures["AllReduces"]) == (1, 2)
    assert gaps_us == pytest.approx([2e-3, 4e-3])  # 2 to 4 ns on the first device, 5 to 9 on the second
    assert orders == [["deep", "first"], ["deep", "first"]]


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="images_per_device=0: must be positive"):
        CHECK["make_config"](CHECK["Options"](images_per_device=0), 1)


def test_ratio_needs_both() -> None:
    assert CHECK["make_row"]("a", 2.0, 3.0) == {"what": "a", "predicted": 2, "measured": 3, "ratio": 1.5}
    for predicted, measured in ((None, 1.0), (1.0, None), (0.0, 1.0)):
        assert CHECK["make_row"]("a", predicted, measured)["ratio"] is None


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs it on CPU devices, also where there is a GPU."""
    command, environment = [sys.executable, str(SCRIPT), *arguments], {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_quick_run() -> None:
    run = run_script("--quick", "--out", "out")
    assert run.returncode == 0, run.stderr
    with Path("out", "check_gpu.csv").open() as file:
        rows = {row["what"]: row for row in csv.DictReader(file)}
    assert (rows["AllReduces"]["predicted"], float(rows["AllReduces"]["measured"])) == ("2", 2)
    assert float(rows["images/s"]["measured"]) == pytest.approx(16e3 / float(rows["step ms"]["measured"]))
    # A loop, of random bits say, is one operation of the program and many events.
    assert 1 <= float(rows["kernels and copies"]["ratio"]) < 1.3
    assert "AllReduces of a step: deep, first; on all devices and steps as planned" in run.stdout
    assert "PyTorch: " in run.stdout
    plain = rows["images/s a device, beside our step without moments"]
    assert 0.2 < float(plain["ratio"]) < 5
    assert Path("out", "check_gpu.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), [([], "pass --quick"), (["--steps", "0"], "must be positive")])
def test_mistakes_of_the_command(arguments: list[str], message: str) -> None:
    run = run_script(*arguments)
    assert run.returncode == 2
    assert run.stderr.startswith("error: ")
    assert message in run.stderr
