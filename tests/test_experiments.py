"""The experiments run, and write what they promise."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "experiments"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sweep_world_size"])
def test_quick_run(name: str) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", "--out", "out"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    with Path("out", f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["N"] for row in rows] == ["1", "2", "4", "8"]
    assert all(float(row["max diff"]) < 1e-6 for row in rows)  # the preset's own model and rates, 20 steps
    assert Path("out", f"{name}.png").stat().st_size > 10_000
    assert " ".join(rows[0]) in " ".join(run.stdout.split())
