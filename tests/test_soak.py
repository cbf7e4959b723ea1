"""Runs that are killed at random moments, as `experiments/soak.py` does a hundred times."""

from dataclasses import replace
from pathlib import Path

import soak


def test_killed_runs_end_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Five get a SIGKILL, one a SIGTERM."""
    options = soak.Options(seed=1)
    whole, loop_seconds = soak.undisturbed(tmp_path, 1)
    rows = [soak.disturb(tmp_path, f"run{index}", options, whole, loop_seconds) for index in range(5)]
    rows.append(soak.disturb(tmp_path, "asked", replace(options, signal="term"), whole, loop_seconds))
    assert [(row["equal"], row["lost"]) for row in rows] == [(1, 0)] * 6, rows
    assert any(row["during"] != "the end" for row in rows), rows
