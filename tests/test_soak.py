"""Runs that are killed at random moments, as `experiments/soak.py` does a hundred times."""

from pathlib import Path

import pytest
import soak


@pytest.mark.parametrize(("name", "count"), [("kill", 5), ("term", 2)])
def test_killed_runs_end_as_if_nothing_had_happened(name: str, count: int, tmp_path: Path) -> None:
    options = soak.Options(signal=name, seed=1)  # type: ignore[arg-type]
    whole, loop_seconds = soak.undisturbed(tmp_path, 1)
    rows = [soak.disturb(tmp_path, f"run{index}", options, whole, loop_seconds) for index in range(count)]
    assert [(row["equal"], row["lost"]) for row in rows] == [(1, 0)] * count, rows
    assert any(row["during"] != "none" for row in rows), rows  # some signal came before the end
