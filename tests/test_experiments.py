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
    assert [row["N"] for row in rows] == ["1", "8"]
    assert all(float(row["max diff"]) < 1e-6 for row in rows)  # the preset's own model and rates, 20 steps


def check_compare_programs(rows: Rows) -> None:
    by_program = {(row["bn"], row["program"]): row for row in rows}
    names = [("local", "pmean"), ("local", "two_group"), ("sync", "automatic"), ("sync", "two_group")]
    assert list(by_program) == names
    # The model is so small that the compiler combines all leaves: one AllReduce, behind nearly everything.
    ordinary, ours = by_program["local", "pmean"], by_program["local", "two_group"]
    assert ordinary["AllReduces"] == "1"
    assert float(ordinary["exposed ms"]) > 0.75 * float(ordinary["communication ms"])
    assert (ours["AllReduces"], ours["blocking"], ours["transposes"]) == ("2", "0", "0")
    assert float(ours["exposed ms"]) < 0.5 * float(ordinary["exposed ms"])
    assert ours["reduced MB"] == ordinary["reduced MB"]
    for row in rows:
        assert 0 <= float(row["gradients exposed ms"]) <= float(row["exposed ms"]) <= float(row["communication ms"])
        parts = float(row["compute ms"]) + float(row["exposed ms"])
        assert float(row["step ms"]) == pytest.approx(parts, abs=0.02)  # of two decimals each


def check_scaling_forecast(rows: Rows) -> None:
    sizes, programs = (1, 64, 256), ("pmean", "per_leaf", "two_group", "auto")
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


def check_zero_memory(rows: Rows) -> None:
    found = {(row["optimizer"], row["N"], row["reducer"]): row for row in rows}
    state = {key: float(row["optimizer MB"]) for key, row in found.items()}
    whole = 4 * 75_290 / 1e6  # float32, one number a parameter
    for (optimizer, ranks, reducer), size_mb in state.items():
        numbers = {"sgd": 1, "adamw": 2}[optimizer]
        parts = int(ranks) if reducer == "zero1" else 1
        assert size_mb == pytest.approx(numbers * whole / parts, rel=0.04), (optimizer, ranks, reducer)  # padding
    for optimizer in ("sgd", "adamw"):  # the compiler agrees
        replicated, sharded = (found[optimizer, "4", reducer] for reducer in ("two_group", "zero1"))
        saved = float(replicated["arguments MB"]) - float(sharded["arguments MB"])
        assert saved == pytest.approx(float(replicated["optimizer MB"]) - float(sharded["optimizer MB"]), abs=2e-3)
        assert float(replicated["total MB"]) > float(sharded["total MB"])


def check_overlap(rows: Rows) -> None:
    places = ["measured here", "1x8 NVLink", "4x8 50 GB/s", "4x8 100 Gb/s a host"]
    assert list(dict.fromkeys(row["where"] for row in rows)) == places
    for row in rows:
        parts = [float(row[f"{name} ms"]) for name in ("forward", "backward", "exposed", "optimizer")]
        assert float(row["both ms"]) == pytest.approx(sum(parts), abs=0.01)
        if row["where"] != "measured here":
            assert min(parts) >= 0
            assert parts[0] > 0
            assert 0 < parts[2] <= float(row["communication only ms"])
    for where in places[1:]:
        own = [row for row in rows if row["where"] == where]
        check_groups({row["program"]: row for row in own if row["program"] != "ddp"})
        if where != "4x8 100 Gb/s a host":  # where few calls count less than late ones
            check_buckets([row for row in own if row["program"] in ("ddp", "two_group")])
    large = [float(row["communication only ms"]) for row in rows if row["bucket MiB"] == "25.0"]
    assert large == sorted(large)


def check_groups(rows: dict[str, dict[str, str]]) -> None:
    single, two_group = rows["single"], rows["two_group"]
    assert float(single["saved %"]) == 0
    # Without overlap hardly anything hides; with it, more does.
    assert float(single["exposed ms"]) > 0.9 * float(single["communication only ms"])
    assert float(two_group["exposed ms"]) < float(single["exposed ms"])


def check_buckets(rows: Rows) -> None:
    *_, two_group = rows
    assert [row["AllReduces"] for row in rows] == ["23", "4", "2", "2"]  # 23 parameters
    assert two_group["blocking"] == "0"
    # The paper's shape: a bucket for each gradient is worst, and the largest are not the best.
    exposed, taken = ([float(row[f"{name} ms"]) for row in rows] for name in ("exposed", "communication only"))
    assert exposed[0] > 3 * exposed[2]
    assert exposed[2] > exposed[1]
    assert exposed[3] < exposed[2]
    assert taken[0] > taken[1] > taken[2]


def check_batchnorm_modes(rows: Rows) -> None:
    assert [row["bn"] for row in rows] == ["local", "sync", "rank0"]
    local, _, rank0 = rows
    # Only what is kept for the evaluation differs between these two: the same is trained, to rounding, which grows.
    losses = [float(row["epoch 1 loss"]) for row in rows]
    assert losses[0] == pytest.approx(losses[2], abs=1e-5)
    assert abs(losses[0] - losses[1]) > 1e-4
    assert local["test loss"] != rank0["test loss"]
    # Two groups, and with sync an AllReduce a layer and direction: 7 layers.
    assert [row["collectives"] for row in rows] == ["2", "16", "2"]
    assert all(20 < float(row["top-1 %"]) <= 100 for row in rows)  # two epochs; guessing gives 10


def check_checkpoint_cost(rows: Rows) -> None:
    assert [row["saving"] for row in rows] == ["none", "beside", "waiting"]
    inside = [float(row["in save, ms each"]) for row in rows]
    assert 0 == inside[0] < inside[1] < inside[2]


def check_own_costs(rows: Rows) -> None:
    tables = {row["table"]: row for row in rows}
    assert [row["table"] for row in rows] == ["starts", "calls", "parts", "parts"]
    assert float(tables["starts"]["second start s"]) < float(tables["starts"]["no cache s"])
    assert int(tables["calls"]["arrays"]) > 100
    assert float(tables["calls"]["us a call"]) > 0
    parts = rows[2:]
    assert [int(row["segments"]) for row in parts] == [5, 6]
    assert all(float(row["plan ms"]) > 0 and int(row["kernels"]) > int(row["tensors"]) for row in parts)


def check_step_traffic(rows: Rows) -> None:
    parts = {row["part"]: (float(row["least GB"]), float(row["compiled GB"])) for row in rows}
    least, compiled = parts["all"]
    assert least < compiled < 1.7 * least  # with eight images BatchNorm is not computed from moments everywhere
    least, compiled = parts["stem"]
    assert compiled == pytest.approx(least, rel=0.1)


def check_soak(rows: Rows) -> None:
    assert [(row["equal"], row["lost"]) for row in rows] == [("1", "0")]


def check_lr_range(rows: Rows) -> None:
    rates, means = ([float(row[name]) for row in rows] for name in ("rate", "mean"))
    assert rates == sorted(rates)
    assert min(means) < 0.9 * means[0]  # it learns before it runs away
    assert rates[means.index(min(means))] > 0.01


def check_input_pipeline(rows: Rows) -> None:
    found = {row["what"]: float(row["median"]) for row in rows}
    assert found["packed, max side 400"] > 1.2 * found["files"] > 0  # images/s of a core
    assert found["second start: index, simulated"] < found["second start: to 256 images"]
    assert found["second start: index, simulated"] < 2 < 10 * found["first start: walk, scaled"]


def check_benchmark_step(rows: Rows) -> None:
    assert {"trjax", "pmean", "automatic"} <= {row["way"] for row in rows}
    assert all(0 < float(row["least"]) <= float(row["images/s"]) <= float(row["most"]) for row in rows)
    ratios = [float(row["ours over it"]) for row in rows if row["way"] in ("pmean", "automatic")]
    assert all(0.3 < ratio < 10 for ratio in ratios)


CHECKS = [check_sweep_world_size, check_compare_programs, check_collective_algorithms]
CHECKS += [check_zero_memory, check_overlap, check_batchnorm_modes, check_scaling_forecast]
CHECKS += [check_checkpoint_cost, check_soak, check_lr_range, check_input_pipeline]
CHECKS += [check_benchmark_step, check_own_costs, check_step_traffic]


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_quick_run(check) -> None:  # type: ignore[no-untyped-def]
    name = check.__name__.removeprefix("check_")
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", "--out", "out"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (table,), (figure,) = (list(Path("out").glob(f"{name}*.{kind}")) for kind in ("csv", "png"))
    with table.open() as file:
        rows = list(csv.DictReader(file))
    check(rows)
    assert figure.stat().st_size > 10_000
    said = " ".join(run.stdout.split())
    for row in rows:  # of one table, or of several with columns of their own
        header = [column for column, cell in row.items() if column != "table" and ("table" not in row or cell)]
        assert " ".join(header) in said


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("collective_algorithms", ["--repeats", "0"], "repeats=0: must be positive"),
        ("overlap", ["--repeats", "-1"], "repeats=-1: must be positive"),
        ("batchnorm_modes", ["--epochs", "0"], "epochs=0, seeds=3: must be positive"),
        ("own_costs", ["--segments", "2"], "segments=(2,): must be 3 or more"),
        ("batchnorm_modes", ["--global-batches", "30"], "global_batch=30 is not divisible by world_size=8"),
        ("zero_memory", ["--quick", "--out", "file"], "File exists: 'file'"),
        ("benchmark_step", ["--repeats", "0"], "repeats=0, seconds=1.5: must be positive"),
        ("benchmark_step", ["--models", "ResNet-9"], "models=ResNet-9: unknown; known: ResNet-20, "),
        ("lr_range", ["--first", "0"], "first=0.0, last=10.0, steps=300: rates must grow"),
        ("scaling_forecast", ["--gpus", "100"], "gpus=100: must be a power of two from 8 to 16384"),
    ],
)
def test_mistakes_are_one_line(
    name: str, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.slow
@pytest.mark.parametrize(("bn", "name"), [("local", "pmean"), ("sync", "automatic")])
def test_ordinary_programs_compute_the_same(bn: str, name: str) -> None:
    config, program = tiny_config(bn=bn), tiny_program(8, bn=bn)
    make_ordinary_step = runpy.run_path(str(FOLDER / "compare_programs.py"))["make_ordinary_step"]
    ordinary = make_ordinary_step(config, one_block_chain(), program.mesh, name)
    one, other = program.init(), program.init()
    for batch in train_batches(load(config.data)[0], config.global_batch, config.seed, 0, 3):
        placed = program.place_train(batch)
        rates, votes = np.full(program.num_steps, 0.05, np.float32), program.votes(False)
        one, ours = program.train_step(one, placed, rates, votes)
        other, theirs = ordinary(other, placed, rates, votes)
        np.testing.assert_allclose(ours[:4], theirs, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one, other)
