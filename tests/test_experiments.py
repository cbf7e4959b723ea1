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


def check_collective_algorithms(rows: Rows) -> None:
    names = ["ring", "tree", "hierarchical", "parameter_server", "psum"]
    assert [row["algorithm"] for row in rows] == 4 * names  # two world sizes, two message sizes
    for row in rows:
        ranks, size_bytes, name = int(row["N"]), int(row["bytes"]), row["algorithm"]
        ring_bytes = 2 * (ranks - 1) * size_bytes // ranks
        sent = {"tree": [1, 1.5][ranks == 4] * size_bytes, "parameter_server": (ranks - 1) * size_bytes}
        assert int(row["sent"]) == sent.get(name, ring_bytes)
        steps = {"tree": 2 * (ranks // 2), "parameter_server": 2, "hierarchical": ranks}
        assert int(row["steps"]) == steps.get(name, 2 * (ranks - 1))
        if name == "hierarchical" and ranks == 4:
            assert int(row["across hosts"]) == size_bytes // 2
        assert 0 < float(row["measured ms"]) < 10_000


def check_sweep_buckets(rows: Rows) -> None:
    machines = ["1x8 NVLink", "4x8 50 GB/s", "32x8 12.5 GB/s"]
    assert list(dict.fromkeys(row["machine"] for row in rows)) == machines
    for where in machines:
        each, some, one, two_group, _ = (row for row in rows if row["machine"] == where)
        assert [row["AllReduces"] for row in (each, some, one, two_group)] == ["23", "4", "1", "2"]  # 23 parameters
        assert two_group["blocking"] == "0"
        # The paper's shape: a bucket for each gradient is worst, and one for all is not the best.
        assert float(each["exposed ms"]) > 3 * float(one["exposed ms"])
        assert float(one["exposed ms"]) > float(some["exposed ms"]) or where == "32x8 12.5 GB/s"
        assert float(two_group["exposed ms"]) < float(one["exposed ms"])
        assert float(each["communication ms"]) > float(some["communication ms"]) > float(one["communication ms"])
    slower = [float(row["communication ms"]) for row in rows if row["bucket MiB"] == "25.0"]
    assert slower == sorted(slower)


CHECKS = [check_sweep_world_size, check_compare_programs, check_collective_algorithms, check_sweep_buckets]


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
