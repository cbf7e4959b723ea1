"""Several processes on this machine, as users start them: the same numbers, the same end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from trjax.launch import free_port, main

JOB = [
    "--data.source", "synthetic", "--data.image-shape", "8", "8", "3", "--data.train-examples", "100",
    "--data.test-examples", "50", "--data.crop-padding", "1", "--data.flip", "--model.width", "4",
    "--global-batch", "24", "--optim.warmup-epochs", "0", "--optim.schedule", "constant",
    "--optim.learning-rate", "0.02", "--platform", "cpu", "--bn", "sync",
]  # fmt: skip
ROUNDING = 2e-5
"""Of parameters after twenty steps: sums in another order, amplified."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Compiled programs are kept for the whole module; compiled fast, to run slowly, as conftest says."""
    kept = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    return {
        **kept, "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "PYTHONUNBUFFERED": "1",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }  # fmt: skip


def start(environment: dict[str, str], *command: str, log: str = "log") -> subprocess.Popen[str]:
    with Path(log).open("w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *command], stdout=file, stderr=subprocess.STDOUT, text=True, env=environment
        )


def launch(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return start(environment, "trjax.launch", "--processes", "2", "--", *JOB, *arguments)


def start_one(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return start(environment, "trjax.train", *JOB, *arguments)


def wait_for(text: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    ended = False
    while text not in Path("log").read_text():
        if ended or time.monotonic() > deadline:
            pytest.fail(Path("log").read_text())
        ended = process.poll() is not None  # it may have said so just before
        time.sleep(0.02)


def children_of(process: subprocess.Popen[str]) -> list[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(int(child) for child in listed)


def state(workdir: str, step: int) -> dict[str, np.ndarray]:
    return load_file(Path(workdir, "checkpoints", f"{step}.safetensors"))


def lines(workdir: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(workdir, "metrics.jsonl").read_text().splitlines()]


def test_two_processes_compute_what_one_does(environment: dict[str, str]) -> None:
    """1 x 8 devices, and two epochs of them followed by two of 2 x 2."""
    whole = start_one(environment, "--epochs", "4", "--devices", "0-7", "--workdir", "whole")
    assert whole.wait(200) == 0, Path("log").read_text()
    for epochs, devices, begin in (("2", "0-7", start_one), ("4", "0-1", launch)):
        moved = begin(environment, "--epochs", epochs, "--devices", devices, "--workdir", "two")
        assert moved.wait(200) == 0, Path("log").read_text()
    said = Path("log").read_text()
    assert "resumed at step 10 of 20" in said
    assert "[1] finished" not in said  # process 0 speaks for all
    for one, other in zip(lines("whole"), lines("two"), strict=True):
        assert (one["step"], one["split"], one["examples"]) == (other["step"], other["split"], other["examples"])
        assert one["loss"] == pytest.approx(other["loss"], rel=ROUNDING)
    left, right = state("whole", 20), state("two", 20)
    for name, leaf in left.items():
        np.testing.assert_allclose(right[name], leaf, atol=ROUNDING, err_msg=name)


def test_two_processes_of_which_one_is_asked_to_stop_are_resumed_by_one(environment: dict[str, str]) -> None:
    stopped = launch(environment, "--epochs", "4000", "--devices", "0-1", "--workdir", "stopped")
    wait_for("epoch 2/", stopped)
    os.kill(children_of(stopped)[1], signal.SIGTERM)
    assert stopped.wait(100) == 130, Path("log").read_text()
    (step,) = {record["step"] for record in lines("stopped")[-1:]}
    assert f"stopped at step {step} after" in Path("log").read_text()
    end = -(-step // 5) + 1
    resumed = start_one(environment, "--epochs", str(end), "--devices", "0-7", "--workdir", "stopped")
    assert resumed.wait(200) == 0, Path("log").read_text()
    assert f"resumed at step {step} of {5 * end}" in Path("log").read_text()
    assert sum(record["examples"] for record in lines("stopped") if record["split"] == "train") == 100 * end


@pytest.mark.slow
def test_two_processes_read_the_images_that_one_does(environment: dict[str, str]) -> None:
    """Each reads its own rows of a batch; what one of them cannot read, it says itself."""
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for index in range(20):
            path = Path("images", split, f"c{index % 2}", f"{index:02}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (12, 10, 3), dtype=np.uint8)).save(path)
    Path("images/train/c1/07.png").write_bytes(b"none")
    job = [
        "--data.source", "images", "--data.root", "images", "--data.image-shape", "8", "8", "3", "--model.width", "4",
        "--global-batch", "8", "--epochs", "2", "--platform", "cpu", "--data.workers", "2",
    ]  # fmt: skip
    kept = {**environment, "XDG_CACHE_HOME": "cache"}
    one = start(kept, "trjax.train", *job, "--devices", "0-3", "--workdir", "one")
    assert one.wait(200) == 0, Path("log").read_text()
    two = start(kept, "trjax.launch", "--processes", "2", "--", *job, "--devices", "0-1", "--workdir", "two")
    assert two.wait(200) == 0, Path("log").read_text()
    assert "warning: c1/07.png is left out" in Path("log").read_text()
    for left, right in zip(lines("one"), lines("two"), strict=True):
        assert left["examples"] == right["examples"] == (19 if left["split"] == "train" else 20)
        assert left["loss"] == pytest.approx(right["loss"], rel=ROUNDING)


def test_the_death_of_one_ends_all_and_loses_nothing(environment: dict[str, str]) -> None:
    """It is process 0, which holds what the others meet by."""
    killed = launch(environment, "--epochs", "4000", "--devices", "0", "--workdir", "run")
    wait_for("epoch 3/", killed)  # the save after epoch 2 has waited for the one after epoch 1
    os.kill(children_of(killed)[0], signal.SIGKILL)
    began = time.monotonic()
    assert killed.wait(100) == 137, Path("log").read_text()
    assert time.monotonic() - began < 60
    assert "process 0 was the first to end, by SIGKILL" in Path("log").read_text()
    (last, *_) = sorted((int(path.stem) for path in Path("run/checkpoints").glob("*.safetensors")), reverse=True)

    orphaned = launch(environment, "--epochs", "4000", "--devices", "0", "--workdir", "run")
    wait_for(f"resumed at step {last} of 20000", orphaned)
    children = children_of(orphaned)
    orphaned.kill()
    orphaned.wait()
    deadline = time.monotonic() + 100
    while any(Path(f"/proc/{child}").exists() for child in children):  # a zombie would have a parent
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0"], "processes=0: must be from 1 to 1024"),
        (["--processes", "100000"], "processes=100000: must be from 1 to 1024"),
        (["--gpus-per-process", "-1"], "gpus_per_process=-1: must be from 0 to 1024"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--"]) == 2
    assert message in capsys.readouterr().err


def test_processes_that_do_not_agree_all_end_and_say_why(environment: dict[str, str]) -> None:
    found_by = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2", "--process-id"]
    processes = [
        start(environment, "trjax.train", *JOB, "--seed", str(seed), *found_by, str(index), log=f"log{index}")
        for index, seed in enumerate((3, 4))
    ]
    assert [process.wait(100) for process in processes] == [2, 2]
    for index in range(2):
        assert "must agree: seed is 4 on process 1 and 3 on process 0" in Path(f"log{index}").read_text()
    assert not Path("runs").exists()


def test_a_process_that_is_stuck_ends_the_run(environment: dict[str, str]) -> None:
    """One of two is stopped in its tracks: the watchdog of the other says where it waits."""
    run = launch(environment, "--epochs", "4000", "--devices", "0", "--workdir", "run", "--watchdog-seconds", "12")
    wait_for("epoch 2/", run)
    _, stuck = children_of(run)
    os.kill(stuck, signal.SIGSTOP)
    wait_for("process 0 was the first to end, with exit code 4", run)
    os.kill(stuck, signal.SIGCONT)
    assert run.wait(100) == 4
    for text in (Path("log").read_text(), Path("run/watchdog0.log").read_text()):
        assert "watchdog: process 0 has finished no step for 12 s, the last was step" in text
        assert "loop.py" in text
