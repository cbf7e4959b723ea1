"""Runs that are killed at random moments, as `experiments/soak.py` does a hundred times."""

from pathlib import Path

import pytest
import soak


@pytest.mark.slow
def test_killed_runs_end_as_if_nothing_had_happened(tmp_path: Path) -> None:
    options = soak.Options(seed=1)
    whole, loop_seconds = soak.undisturbed(tmp_path, 1)
    soon = loop_seconds / 2  # a run that ends before its signal is done again
    rows = [soak.disturb(tmp_path, f"run{index}", options, whole, soon) for index in range(2)]
    assert [(row["equal"], row["lost"]) for row in rows] == [(1, 0)] * 2, rows
    assert any(row["during"] != "the end" for row in rows), rows
