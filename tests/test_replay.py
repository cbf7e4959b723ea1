"""A step that was not finite, done again: where it begins."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import dense_chain, noise_block

from trjax.data.batches import Batch, Inputs
from trjax.models.chain import init_chain
from trjax.run.replay import find_first
from trjax.train import main

TINY = [
    "--data.source", "synthetic", "--data.image-shape", "8", "8", "3", "--data.train-examples", "60",
    "--data.test-examples", "30", "--model.arch", "resnet8", "--model.width", "4", "--global-batch", "24",
    "--optim.warmup-epochs", "0", "--platform", "cpu", "--devices", "0-1",
]  # fmt: skip


def first(change: Any = lambda params: params, images: Any = None) -> str:
    chain = dense_chain("local")  # op by op: every operation compiles by itself
    params, batch_stats = init_chain(chain, jax.random.key(0), (3, 3, 1))
    noise, labels, mask = noise_block(0, 4, (3, 3, 1))
    images = noise if images is None else images
    block = Batch(images, labels, mask, labels)
    return find_first(chain, change(params), batch_stats, Inputs(jnp.asarray(images)), block, jax.random.key(0), 4)


def test_the_first_segment_and_the_operation_are_named() -> None:
    assert first() == ""

    def spoil(params: Any) -> Any:
        last = {**params["last"]["Dense_0"], "bias": jnp.full(10, jnp.inf)}
        return {**params, "last": {"Dense_0": last}}

    assert first(spoil) == "forward of last: last/output"
    assert first(images=np.full((4, 3, 3, 1), np.nan, np.float32)).startswith("forward of first: invalid value (nan)")


def test_a_run_that_gave_up_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*TINY, "--epochs", "2", "--workdir", "run", "--optim.learning-rate", "1e30", "--max-bad-steps", "2"]
    assert main(arguments) == 3
    assert "2 steps in a row, the first of them step 2, had gradients that are not finite" in capsys.readouterr().err
    assert main(["--workdir", "run", "--replay-step"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[-2:]] == ["micro-batch 0, device 0", "micro-batch 0, device 1"]
    assert all("forward of" in line for line in lines[-2:])


def test_there_must_be_a_step_to_replay(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert main(["--workdir", "empty", "--replay-step"]) == 2
    assert "no bad_step.json there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"step": 1',
        "[" * 5000,
        '{"step": 1, "epoch": 0, "devices": 0, "indices": [3]}',
        '{"step": 1, "epoch": 0, "devices": 2, "indices": [-3]}',
        '{"step": 1.5, "epoch": 0, "devices": 2, "indices": [3]}',
        '{"step": 1, "epoch": 0, "devices": 7, "indices": [3]}',
        '{"step": 1, "epoch": 0, "devices": 2, "indices": [2000]}',
        f'{{"step": 1, "epoch": 0, "devices": 2, "indices": {list(range(97))}}}',
    ],
)
def test_a_damaged_step_is_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/bad_step.json").write_text(text)
    assert main(["--workdir", "run", "--replay-step"]) == 2
    assert "error: run/bad_step.json is damaged (" in capsys.readouterr().err
