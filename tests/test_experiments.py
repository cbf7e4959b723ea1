"""The experiments run, and write what they promise."""

import csv
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import one_block_chain, tiny_config, tiny_program

from trjax.data.batches import train_batches
from trjax.data.sources import load

FOLDER = Path(__file__).parents[1] / "experiments"
Rows = list[dict[str, str]]


def check_sweep_world_size(rows: Rows) -> None:
    assert [row["N"] for row in rows] == ["1", "2", "4", "8"]
    assert all(float(row["max diff"]) < 1e-6 for row in rows)  # the preset's own model and rates, 20 steps


def check_compare_programs(rows: Rows) -> None:
    by_program = {(row["bn"], row["program"]): row for row in rows}
    names = [("local", "per_leaf"), ("local", "two_group"), ("local", "auto")]
    assert list(by_program) == [*names, ("sync", "automatic"), ("sync", "two_group"), ("sync", "auto")]
    # The model is so small that the compiler combines all leaves: one AllReduce, behind everything.
    ordinary, ours = by_program["local", "per_leaf"], by_program["local", "two_group"]
    assert (ordinary["AllReduces"], ordinary["blocking"]) == ("1", "1")
    assert (ours["AllReduces"], ours["blocking"], ours["transposes"]) == ("2", "0", "0")
    assert float(ours["exposed ms"]) < float(ordinary["exposed ms"])
    assert ours["reduced MB"] == ordinary["reduced MB"] == by_program["local", "auto"]["reduced MB"]
    for row in rows:
        assert 0 <= float(row["gradients exposed ms"]) <= float(row["exposed ms"]) <= float(row["communication ms"])
        parts = float(row["compute ms"]) + float(row["exposed ms"])
        assert float(row["step ms"]) == pytest.approx(parts, abs=0.02)  # of two decimals each


def check_scaling_forecast(rows: Rows) -> None:
    sizes, programs = (1, 64, 256), ("ordinary", "per_leaf", "two_group", "auto")
    assert [(row["GPUs"], row["program"]) for row in rows] == [(str(n), name) for n in sizes for name in programs]
    for row in rows:
        exposed, step = float(row["exposed ms"]), float(row["step ms"])
        assert step == pytest.approx(float(row["compute ms"]) + exposed, abs=0.02)  # of two decimals each
        assert float(row["images/s"]) == pytest.approx(128 * int(row["GPUs"]) * 1e3 / step, rel=0.015)
        assert float(row["efficiency %"]) == pytest.approx(100 * (1 - exposed / step), abs=0.5)
    exposed_ms = {(int(row["GPUs"]), row["program"]): float(row["exposed ms"]) for row in rows}
    for name in programs:
        assert 0 == exposed_ms[1, name] < exposed_ms[64, name] < exposed_ms[256, name]  # the link's latency
    assert all(exposed_ms[n, "auto"] < exposed_ms[n, "two_group"] for n in sizes[1:])
    assert rows[3]["launched after"] == "stage1_block1, stem" != rows[-1]["launched after"]


CHECKS = [check_sweep_world_size, check_compare_programs, check_scaling_forecast]


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_quick_run(check) -> None:  # type: ignore[no-untyped-def]
    name = check.__name__.removeprefix("check_")
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", "--out", "out"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    with Path("out", f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    check(rows)
    assert Path("out", f"{name}.png").stat().st_size > 10_000
    assert " ".join(rows[0]) in " ".join(run.stdout.split())


def test_scaling_forecast_refuses_a_size_in_one_line() -> None:
    command = [sys.executable, str(FOLDER / "scaling_forecast.py"), "--gpus", "100"]
    run = subprocess.run(command, capture_output=True, text=True)
    message = "error: gpus=100: must be a power of two from 8 to 16384\n"
    assert (run.returncode, run.stdout, run.stderr) == (2, "", message)


@pytest.mark.slow
@pytest.mark.parametrize(("bn", "name"), [("local", "per_leaf"), ("sync", "automatic")])
def test_ordinary_programs_compute_the_same(bn: str, name: str) -> None:
    config, program = tiny_config(bn=bn), tiny_program(8, bn=bn)
    make_ordinary_step = runpy.run_path(str(FOLDER / "compare_programs.py"))["make_ordinary_step"]
    ordinary = make_ordinary_step(config, one_block_chain(), program.mesh, name)
    one, other = program.init(), program.init()
    for batch in train_batches(load(config.data)[0], config.global_batch, config.seed, 0, 3):
        placed = program.place_train(batch)
        one, ours = program.train_step(one, placed, np.float32(0.05), np.int32(0))
        other, theirs = ordinary(other, placed, np.float32(0.05), np.int32(0))
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one, other)
