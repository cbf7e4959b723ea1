"""The loop, as a user meets it: through `main`, and as a process of its own."""

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import CIFAR_COUNT, DATA, one_block_chain, shrink_cifar, spread, tiny_config, tiny_program, write_cifar
from safetensors import numpy as safetensors
from safetensors.numpy import load_file

from trjax.config.run import Config, DataConfig, OptimConfig
from trjax.config.toml import read_table
from trjax.data import sources
from trjax.data.batches import epoch_order
from trjax.mesh import make_mesh
from trjax.models.resnet import Head
from trjax.run import fit as fit_module
from trjax.run.checkpoints import CheckpointInfo, Checkpoints, decode
from trjax.run.fit import RunSummary, fit, format_summary
from trjax.run.loop import BadNumbersError
from trjax.run.setup import set_up_run
from trjax.run.workdir import lock_workdir
from trjax.step.collectives import sum_moments
from trjax.step.compile import compile_program
from trjax.step.program import make_program
from trjax.train import main

TINY = [
    "--data.source", "synthetic", "--data.image-shape", "8", "8", "3", "--data.train-examples", "60",
    "--data.test-examples", "30", "--data.crop-padding", "1", "--model.width", "4", "--global-batch", "24",
    "--optim.warmup-epochs", "0", "--platform", "cpu",
]  # fmt: skip
STEPS_PER_EPOCH = 3


@pytest.fixture(autouse=True)
def _small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, the configured ResNet is one block: it compiles in a second or two."""
    chain_of = lambda config, spec: one_block_chain(sum_moments if config.bn == "sync" else None)  # noqa: E731
    monkeypatch.setattr("trjax.step.program.make_chain", chain_of)


def lines(workdir: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(workdir, "metrics.jsonl").read_text().splitlines()]


AUGMENTED = replace(DATA, crop_padding=1, flip=True)


def run_tiny(workdir: str, stop_after: int = 0, **changes: Any) -> Any:
    """Trains the smallest chain; an interrupt arrives during step `stop_after`, counted from the process's start."""
    config = tiny_config(workdir=workdir, log_every=2, **changes)
    calls = 0

    def interrupted() -> bool:
        nonlocal calls
        calls += 1
        return bool(stop_after) and calls > stop_after

    with pytest.MonkeyPatch.context() as patch:
        if stop_after:
            # asked before an epoch, after each step, before an evaluation, and after each of its batches
            patch.setattr(fit_module, "catch_interrupts", lambda: nullcontext(interrupted))
        return fit(config)


def final_state(workdir: str, config: Config, devices: str = "0") -> Any:
    checkpoints = Checkpoints(Path(workdir, "checkpoints"), pytest.fail)
    assert checkpoints.last is not None
    shapes = make_program(config, make_mesh(devices)).layouts.saved_shape
    return decode(checkpoints.read(checkpoints.last.step), shapes, workdir)


def test_a_run_from_the_command_line(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        assert main([*TINY, "--epochs", "2", "--devices", "0-2", "--log-every", "2"]) == 0
    for program in ("update", "accumulate", "reduce_totals"):
        compiled = [record for record in caplog.records if f"Compiling jit({program})" in record.getMessage()]
        assert len(compiled) == 1, program
    (workdir,) = Path("runs").iterdir()
    records = lines(workdir)
    keys = "split epoch step loss top1 top5 examples skipped learning_rate images_per_second seconds input_seconds"
    assert all(list(record) == keys.split() for record in records)
    assert [(record["split"], record["epoch"], record["step"], record["examples"]) for record in records] == [
        ("train", 1, 2, 48), ("train", 1, 3, 12), ("test", 1, 3, 30),
        ("train", 2, 4, 24), ("train", 2, 6, 36), ("test", 2, 6, 30),
    ]  # fmt: skip
    assert all(0 <= record["top1"] <= record["top5"] <= 1 and record["images_per_second"] > 0 for record in records)
    out = capsys.readouterr().out
    assert f"60 training and 30 test examples, 3 cpu devices, {workdir}" in out
    assert re.search(r"epoch 2/2  step 6  test   loss \d\.\d{4}  top-1 +[\d.]+%", out)
    best = max(record["top1"] for record in records if record["split"] == "test")
    assert f"last test top-1 {records[-1]['top1']:.2%}" in out
    assert f"best test top-1 {best:.2%} at step" in out
    assert f"checkpoints in {workdir}/checkpoints" in out
    table = read_table(workdir / "config.toml")
    assert (table["epochs"], table["devices"], table["workdir"]) == (2, "0-2", "")


def test_the_written_config_reproduces_the_run() -> None:
    assert main([*TINY, "--epochs", "1", "--workdir", "one", "--seed", "5"]) == 0
    assert main(["--config", "one/config.toml", "--workdir", "two"]) == 0
    timing = {"images_per_second", "seconds", "input_seconds"}
    strip = lambda records: [{key: record[key] for key in record.keys() - timing} for record in records]  # noqa: E731
    assert strip(lines("one")) == strip(lines("two"))
    one, two = (load_file(Path(run, "checkpoints", "3.safetensors")) for run in ("one", "two"))
    assert {name: leaf.tobytes() for name, leaf in one.items()} == {name: leaf.tobytes() for name, leaf in two.items()}


def test_stopping_after_any_step_and_resuming_is_bitwise_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs of five batches, the fifth of them partial, stopped once after every step."""
    config, total = tiny_config(epochs=2, log_every=2, data=AUGMENTED), 2 * 5
    program = make_program(config, make_mesh("0-1"))
    compiled = compile_program(program)
    monkeypatch.setattr("trjax.run.setup.make_program", lambda *_: program)
    monkeypatch.setattr(fit_module, "compile_program", lambda *_: compiled)
    run_tiny("whole", devices="0-1", data=AUGMENTED)
    whole = final_state("whole", config)
    assert int(whole.step) == total
    for stop_after in range(1, total):
        workdir = f"stop{stop_after}"
        # one question a step, one before each epoch, one before its evaluation, and three in it
        summary = run_tiny(workdir, stop_after=stop_after + 5 * ((stop_after - 1) // 5), devices="0-1", data=AUGMENTED)
        assert (summary.finished, summary.step) == (False, stop_after)
        assert run_tiny(workdir, devices="0-1", data=AUGMENTED).finished
        jax.tree.map(np.testing.assert_array_equal, final_state(workdir, config), whole)
        records = lines(workdir)
        assert sum(record["examples"] for record in records if record["split"] == "train") == 200
        assert [record["step"] for record in records if record["split"] == "test"] == [5, 10]


def test_records_are_never_behind_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is killed behind it loses no line of what came before."""
    seen, save = {}, Checkpoints.save

    def spy(self: Checkpoints, state: Any, info: CheckpointInfo) -> None:
        seen[info.step] = sum(line["examples"] for line in lines("run") if line["split"] == "train")
        save(self, state, info)

    monkeypatch.setattr(Checkpoints, "save", spy)
    run_tiny("run", save_every=3)
    assert seen == {3: 72, 5: 100, 6: 124, 9: 196, 10: 200}


def test_resuming_on_other_devices_goes_on() -> None:
    """Saved on eight, resumed on 4, 2, 1 and 3: the same batches, and with `sync` the same curve to rounding."""
    run_tiny("whole", bn="sync", devices="0")
    whole = final_state("whole", tiny_config(bn="sync"))
    run_tiny("saved", stop_after=4, bn="sync", devices="0-7")
    for devices in ("0-3", "0-1", "0", "0-2"):
        shutil.copytree("saved", devices)
        assert run_tiny(devices, bn="sync", devices=devices).step == 10
        moved = final_state(devices, tiny_config(bn="sync"))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), moved, whole)
        losses = [[record["loss"] for record in lines(run) if record["epoch"] == 2] for run in ("whole", devices)]
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_last_and_best_are_kept() -> None:
    run_tiny("run", epochs=6)
    records = [record for record in lines("run") if record["split"] == "test"]
    best = max(records, key=lambda record: record["top1"])
    checkpoints = Checkpoints(Path("run/checkpoints"), pytest.fail)
    assert checkpoints.last is not None
    assert checkpoints.best is not None
    assert (checkpoints.last.step, checkpoints.best.test_top1) == (30, best["top1"])
    kept = {25, 30, checkpoints.best.step}
    names = {path.name for path in Path("run/checkpoints").iterdir()}
    assert names == {f"{step}.safetensors{end}" for step in kept for end in ("", ".sha256")}


def test_the_best_by_any_number_and_as_many_of_the_last_as_asked_for_are_kept() -> None:
    run_tiny("run", epochs=6, keep=1, best_by="ema/loss", optim=OptimConfig(learning_rate=0.5, ema_decay=0.5))
    losses = {record["step"]: record["loss"] for record in lines("run") if record["split"] == "ema"}
    best = min(losses, key=lambda step: losses[step])
    assert {path.stem for path in Path("run/checkpoints").glob("*.safetensors")} == {"30", str(best)}
    with pytest.raises(ValueError, match="best_by=ema/top1 with optim.ema_decay=0.0: there are no running means"):
        tiny_config(best_by="ema/top1")


def test_finished_run_is_left_alone_until_there_are_more_epochs() -> None:
    run_tiny("run")
    before = {path: path.stat().st_mtime_ns for path in Path("run/checkpoints").rglob("*")}
    saved, metrics = Path("run/config.toml").read_text(), Path("run/metrics.jsonl").read_text()
    summary = run_tiny("run")
    assert (summary.finished, summary.step) == (True, 10)
    assert summary.last_top1 is not None
    with pytest.raises(ValueError, match=r"epochs=1 end before step 10, where run is; pass more --epochs"):
        run_tiny("run", epochs=1)
    assert {path: path.stat().st_mtime_ns for path in Path("run/checkpoints").rglob("*")} == before
    assert (Path("run/config.toml").read_text(), Path("run/metrics.jsonl").read_text()) == (saved, metrics)
    assert run_tiny("run", epochs=3).step == 15
    assert read_table("run/config.toml")["epochs"] == 3


def test_other_options_in_the_same_folder_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--epochs", "1", "--workdir", "run"]) == 0
    saved = Path("run/config.toml").read_text()
    assert main([*TINY, "--epochs", "1", "--workdir", "run", "--seed", "3", "--optim.learning-rate", "1"]) == 2
    error = capsys.readouterr().err
    assert "run holds another run: seed is 0 there and 3 here; optim.learning_rate is 0.1 there and 1.0 here" in error
    assert Path("run/config.toml").read_text() == saved


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--devices", "0-7", "--global-batch", "100"],
            "global_batch=100 is not divisible by world_size=8; nearest valid: 96, 104",
        ),
        (["--devices", "0-9"], "index 9 is out of range; there are 8 cpu devices"),
        (["--preset", "cifar10-resnet20"], "needs --data.root"),
        (["--preset", "imagenet-resnet50"], "data.root='': must be the folder of the images"),
        (["--workdir", "file"], "workdir=file cannot be used"),
        (["--workdir", "strange"], "holds checkpoints but no config.toml"),
        (["--workdir", "/proc/run"], "workdir=/proc/run cannot be used"),
        (["--optim.warmup-epochs", "0", "--optim.warmup-steps", "601"], "the warm-up must end within the run"),
        (["--preset", "cifar10-resnet20", "--epochs", "20"], "pass --optim.milestones"),
        (["--epochs", "1"], "pass --optim.warmup-epochs"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    Path("strange/checkpoints").mkdir(parents=True)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not Path("runs").exists()


def test_a_second_run_in_the_same_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    with lock_workdir(Path("run")):
        assert main([*TINY, "--epochs", "1", "--workdir", "run"]) == 2
    assert re.search(r"workdir=run is in use by process \d+ on \S", capsys.readouterr().err)
    assert {path.name for path in Path("run").iterdir()} == {"lock"}
    assert main([*TINY, "--epochs", "1", "--workdir", "run"]) == 0


def test_the_lock_names_its_process_and_goes_with_it() -> None:
    code = (
        "import time; from pathlib import Path; from trjax.run.workdir import lock_workdir\n"
        "with lock_workdir(Path('.')): print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        owner = f"workdir=. is in use by process {holder.pid} on {socket.gethostname()}"
        with pytest.raises(ValueError, match=re.escape(owner)), lock_workdir(Path()):
            pass
        holder.kill()
    with lock_workdir(Path()):
        assert Path("lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_a_full_disk_ends_the_run_and_harms_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_tiny("run", epochs=1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert main(["--workdir", "run", "--epochs", "3"]) == 1
    assert "No space left on device; checkpoints are as they were" in capsys.readouterr().err
    checkpoints = Checkpoints(Path("run/checkpoints"), pytest.fail)
    assert checkpoints.last is not None
    assert checkpoints.last.step == 5


def test_a_data_folder_that_vanished_is_named_and_harms_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shrink_cifar(monkeypatch)
    spec = replace(
        sources.describe(DataConfig(source="cifar10")), train_examples=5 * CIFAR_COUNT, test_examples=CIFAR_COUNT
    )
    monkeypatch.setattr(sources, "_CIFAR10", spec)
    write_cifar("cifar10", 0, Path("data"))
    options = ["--data.source", "cifar10", "--data.root", "data", "--workdir", "run"]
    assert main([*TINY[14:], "--epochs", "1", *options]) == 0
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    shutil.rmtree("data")
    assert main(["--workdir", "run", "--epochs", "2"]) == 2
    assert "data.root=data" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def test_damaged_checkpoints_are_said_and_the_one_before_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    run_tiny("run")
    whole = Path("run/checkpoints/10.safetensors").read_bytes()
    Path("run/checkpoints/10.safetensors").write_bytes(whole[:-1])
    assert run_tiny("run", epochs=2).step == 10
    out = capsys.readouterr().out
    assert "warning: checkpoint run/checkpoints/10.safetensors is skipped: its digest is another" in out
    assert "resumed at step 5 of 10" in out
    # done again to the bit, beside the damaged one
    assert load_file("run/checkpoints/10.safetensors").keys() == safetensors.load(whole).keys()
    assert Path("run/checkpoints/10.damaged1.safetensors").read_bytes() == whole[:-1]
    for path in Path("run/checkpoints").glob("*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="none of the checkpoints in run/checkpoints is whole"):
        run_tiny("run", epochs=2)


def test_metrics_of_steps_done_again_are_dropped() -> None:
    run_tiny("run", stop_after=3)
    with Path("run/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"split": "train", "step": 5}) + '\n{"split": "tr')  # killed two steps later
    run_tiny("run")
    assert [(record["split"], record["step"]) for record in lines("run")] == [
        ("train", 2), ("train", 3), ("train", 4), ("train", 5), ("test", 5),
        ("train", 6), ("train", 8), ("train", 10), ("test", 10),
    ]  # fmt: skip


def test_another_model_is_named_by_what_differs() -> None:
    run_tiny("run")
    with pytest.raises(ValueError, match=r"is of another model .*is float32\[10\] there and float32\[11\] here"):
        fit(tiny_config(workdir="run", log_every=2, epochs=3), {**one_block_chain(), "head": Head(11)})


def test_training_set_of_another_size_is_refused() -> None:
    run_tiny("run", stop_after=3)
    text = Path("run/config.toml").read_text()
    Path("run/config.toml").write_text(text.replace("train_examples = 100", "train_examples = 60"))
    with pytest.raises(ValueError, match=r"stopped at batch 3 of epoch 1, which is not step 3 of the data given now"):
        run_tiny("run", data=replace(DATA, train_examples=60))


def test_checkpoint_holds_the_state_to_the_bit_on_other_devices() -> None:
    """Saved from eight devices, BatchNorm statistics included, and read on three."""
    program_of_eight, program = tiny_program(8), tiny_program(3)
    state = program_of_eight.init()
    state = replace(state, params=spread(state.params), batch_stats=spread(state.batch_stats, 1))
    checkpoints = Checkpoints(Path("checkpoints"), pytest.fail)
    info = CheckpointInfo(0, {"epoch": 0, "batch": 0}, {"seed": 1}, None)
    checkpoints.save(program_of_eight.layouts.unload(state), info)
    checkpoints.wait()
    found = Checkpoints(Path("checkpoints"), pytest.fail)
    assert found.last == info
    assert found.best is None
    restored = program.layouts.load(decode(found.read(0), program.layouts.saved_shape, "it"))
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert len(jax.tree.leaves(restored)[0].addressable_shards) == 3


def test_numbers_gone_wrong_change_nothing_and_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The first update is so large that every gradient after it overflows."""
    with pytest.raises(BadNumbersError, match=r"4 steps in a row, the first of them step 2, had gradients"):
        run_tiny("run", optim=OptimConfig(learning_rate=1e30), max_bad_steps=4)
    assert "warning: 1 steps up to step 2 had gradients that are not finite" in capsys.readouterr().out
    assert [(record["step"], record["examples"], record["skipped"]) for record in lines("run")] == [
        (2, 24, 1), (4, 0, 2), (5, 0, 1),
    ]  # fmt: skip
    bad = json.loads(Path("run/bad_step.json").read_text())
    order = epoch_order(0, 0, 100)
    assert (bad["step"], bad["epoch"], bad["indices"]) == (1, 0, order[24:48].tolist())


def test_no_step_follows_the_one_that_was_too_many() -> None:
    """Else the parameters that are saved would not be those that it saw."""
    with pytest.raises(BadNumbersError, match=r"1 steps in a row, the first of them step 2"):
        run_tiny("run", optim=OptimConfig(learning_rate=1e30), max_bad_steps=1)
    assert json.loads(Path("run/bad_step.json").read_text())["checkpoint"] == 2
    last = Checkpoints(Path("run/checkpoints"), pytest.fail).last
    assert last is not None
    assert last.step == 2


def test_a_stop_does_not_wait_for_the_evaluation() -> None:
    """It comes in the last step of an epoch, or in the evaluation; that is done when the run goes on."""
    run_tiny("whole")
    for name, stop_after in (("behind the step", 5), ("in the evaluation", 8)):
        summary = run_tiny(name, stop_after=stop_after)
        assert (summary.finished, summary.step, summary.last_top1) == (False, 5, None)
        assert [record["split"] for record in lines(name)] == ["train", "train", "train"]
        assert run_tiny(name).finished
        timing = dict.fromkeys(("images_per_second", "seconds", "input_seconds"), 0)
        strip = [[{**record, **timing} for record in lines(run)] for run in ("whole", name)]
        assert strip[0] == strip[1]


@pytest.mark.parametrize("changes", [{}, pytest.param({"accumulate": 2, "reducer": "zero1"}, marks=pytest.mark.slow)])
def test_several_steps_in_a_call_are_the_same_steps(changes: Any) -> None:
    """Three steps at a time, then two, of five an epoch, with a checkpoint every four; stopped in between."""
    config = {"devices": "0-1", "data": AUGMENTED, "save_every": 4, **changes}
    run_tiny("one", **config)
    stopped = run_tiny("several", steps_per_dispatch=3, stop_after=2, **config)
    assert (stopped.finished, stopped.step) == (False, 4)  # behind a call of three, and one alone: a checkpoint is due
    run_tiny("several", steps_per_dispatch=2, **config)
    one, several = [load_file(Path(run, "checkpoints", "10.safetensors")) for run in ("one", "several")]
    for name, leaf in one.items():
        np.testing.assert_allclose(several[name], leaf, atol=1e-6, err_msg=name)
    tests = [[line["loss"] for line in lines(run) if line["split"] == "test"] for run in ("one", "several")]
    assert tests[0] == pytest.approx(tests[1], rel=1e-5)
    # lines are due every two steps; one call has one time, and so one line: of 3, 1 | 1, 2, 1 | 1, 1 steps
    assert [line["step"] for line in lines("several") if line["split"] == "train"] == [3, 4, 5, 7, 8, 10]


def test_no_step_of_a_call_follows_one_bad_step_too_many() -> None:
    with pytest.raises(BadNumbersError, match=r"4 steps in a row, the first of them step 2"):
        run_tiny("run", optim=OptimConfig(learning_rate=1e30), max_bad_steps=4, steps_per_dispatch=2)
    assert json.loads(Path("run/bad_step.json").read_text())["checkpoint"] == 5
    with pytest.raises(ValueError, match="steps_per_dispatch=3 with max_bad_steps=4: must be at most half"):
        tiny_config(max_bad_steps=4, steps_per_dispatch=3)
    with pytest.raises(ValueError, match="steps_per_dispatch=3 with save_every=2: no checkpoint"):
        tiny_config(save_every=2, steps_per_dispatch=3)
    with pytest.raises(ValueError, match="steps_per_dispatch=6 with 5 steps an epoch: the end of an epoch ends"):
        run_tiny("other", max_bad_steps=0, steps_per_dispatch=6)
    with pytest.raises(ValueError, match="steps_per_dispatch=2 with data.sizes"):
        tiny_config(data=replace(DATA, sizes=(4,), size_epochs=(1,)), steps_per_dispatch=2)


def test_a_last_batch_that_is_left_out_is_nowhere() -> None:
    assert run_tiny("run", last_batch="drop").step == 8
    assert [(record["step"], record["examples"]) for record in lines("run") if record["split"] == "train"] == [
        (2, 48), (4, 48), (6, 48), (8, 48),
    ]  # fmt: skip


def test_a_few_batches_to_learn_by_heart() -> None:
    config: dict[str, Any] = {"overfit_batches": 2, "epochs": 3, "global_batch": 8, "data": DATA}
    assert run_tiny("run", **config).step == 6
    assert [line["examples"] for line in lines("run") if line["split"] == "test"] == [16] * 3
    with set_up_run(tiny_config(workdir="run", **config), None, None, pytest.fail) as setup:
        assert len(setup.train_source) == len(setup.test_source) == 16
        images, _ = sources.load(DATA)[0].read(np.arange(16))
        for source in (setup.train_source, setup.test_source):
            np.testing.assert_array_equal(source.read(np.arange(16))[0], images)
    with pytest.raises(ValueError, match="overfit_batches=13 with global_batch=8: these are 104 examples, and there"):
        run_tiny("more", **config | {"overfit_batches": 13})


def launch(*arguments: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, "-W", "error::DeprecationWarning:trjax", "-m", "trjax.train", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_process_outlives_its_reader_and_saves_when_interrupted() -> None:
    """`trjax.train ... | head`, then Ctrl-C; what a machine without a GPU prints holds no traceback."""
    process = launch(*TINY[:-2], "--epochs", "400", "--workdir", "run")
    assert process.stdout is not None
    assert "60 training and 30 test examples, 1 cpu device, run" in process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    deadline = time.time() + 120
    while not (Path("run/metrics.jsonl").exists() and len(lines("run")) > 3) and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert err.strip() == "stopping after this step, with a checkpoint; again to stop at once"
    last = Checkpoints(Path("run/checkpoints"), pytest.fail).last
    assert last is not None
    step = last.step
    assert 3 <= step < 1200
    assert lines("run")[-1]["step"] == step
    assert read_table("run/config.toml")["epochs"] == 400


def test_the_model_of_the_readme_trains() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (block,) = re.findall(r"^    import flax\.linen as nn\n.*?\.best\)", text, re.DOTALL | re.MULTILINE)
    code = textwrap.dedent(block).replace("epochs=5", 'epochs=1, devices="0-1"')
    exec(code, {"__name__": "own"})  # as someone would paste it
    assert lines("own")[-1]["split"] == "test"


def test_a_run_is_evaluated_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--epochs", "1", "--workdir", "run", "--optim.ema-decay", "0.5", "--devices", "0-2"]) == 0
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["--workdir", "run", "--eval-only", "--devices", "0-1"]) == 0
    said = capsys.readouterr().out.splitlines()
    for line, record, name in zip(said, lines("run")[-2:], ("parameters", "running means"), strict=True):
        expected = f"step 3, {name}: loss {record['loss']:.4f}  top-1 {record['top1']:.2%}  top-5 {record['top5']:.2%}"
        assert line == f"{expected} of 30 examples"
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    assert main(["--eval-only"]) == 2
    assert "eval_only: which run? Pass its --workdir" in capsys.readouterr().err
    assert main(["--workdir", "run", "--eval-only", "--data.flip-test"]) == 2
    assert "data.flip_test is False there and True here" in capsys.readouterr().err
    assert main(["--workdir", "run", "--eval-only", "--dry-run"]) == 2
    assert "pass one of them" in capsys.readouterr().err
    assert main(["--workdir", "run", "--epochs", "2", "--best-by", "test/loss"]) == 2  # scores of two kinds
    assert "best_by is 'test/top1' there and 'test/loss' here" in capsys.readouterr().err


def test_a_dry_run_says_everything_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--devices", "0-1", "--dry-run"]) == 0
    out = capsys.readouterr().out
    for text in ("global_batch = 24", "2 collectives", "step ", "memory: 0.00", "G_FIRST_CONV", "launched after"):
        assert text in out
    assert list(Path().iterdir()) == []


def test_a_device_that_runs_out_of_memory_says_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12345 bytes.")

    monkeypatch.setattr(fit_module, "run_loop", full)
    assert main([*TINY, "--epochs", "1", "--workdir", "run"]) == 1
    error = capsys.readouterr().err
    assert re.search(
        r"out of memory: the step needs 0\.\d\d GB on each device, which has \d+\.\d\d GB; use a smaller", error
    )
    assert "--accumulate, --remat stage, or --reducer zero1" in error
    monkeypatch.setattr(fit_module, "compile_program", full)
    assert main([*TINY, "--epochs", "1", "--workdir", "run"]) == 1
    assert re.search(
        r"out of memory: compiling needs more than each device has, \d+\.\d\d GB; use", capsys.readouterr().err
    )


def test_what_is_said_at_the_end() -> None:
    summary = RunSummary(False, 7, None, (3, 0.5), Path("run"), 2.4)
    assert format_summary(summary).splitlines() == [
        "stopped at step 7 after 2 s",
        "best test top-1 50.00% at step 3",
        "checkpoints in run/checkpoints",
        "resume with: python -m trjax.train --workdir run",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["0-0", "0-2", "0-7"])
def test_digits_reaches_its_accuracy(devices: str) -> None:
    process = launch("--devices", devices, "--workdir", "run")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    tests = [record["top1"] for record in lines("run") if record["split"] == "test"]
    assert tests[-1] >= 0.99, out
