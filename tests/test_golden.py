"""A run, its checkpoint and its export, as trjax 0.1.0 wrote them, resume, predict and load in every later version.

They come from `python -m trjax.train --workdir run --devices 0-1 --model.width 4 --epochs 12 --optim.warmup-epochs 1
--optim.ema-decay 0.9 --keep 1 --seed 3` and `python -m trjax.export run --out model.safetensors`. The expected numbers
are those that the same version gave.
"""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from trjax import predict, train
from trjax.config.data import DataConfig
from trjax.data.sources import load
from trjax.models.weights import from_torch, read_weights
from trjax.run.saved_model import open_model

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "run", tmp_path / "run"))


def test_a_golden_run_resumes(run: Path) -> None:
    assert train.main(["--workdir", str(run), "--epochs", "14", "--devices", "0-1", "--no-keep-compiled"]) == 0
    test, ema = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[-2:])
    assert [record["step"] for record in (test, ema)] == [210, 210]
    assert test["loss"] == pytest.approx(1.2717829, rel=1e-3)  # 1.2977 before
    assert ema["loss"] == pytest.approx(1.2768011, rel=1e-3)


def test_a_golden_run_is_evaluated(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--workdir", str(run), "--eval-only", "--devices", "0-1"]) == 0
    parameters, means = capsys.readouterr().out.splitlines()
    assert "top-1 55.56%  top-5 96.94% of 360 examples" in parameters
    assert "top-1 55.00%  top-5 96.94% of 360 examples" in means


def test_a_golden_run_predicts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, labels = load(DataConfig())[1].read(np.arange(3), 0)
    assert labels.tolist() == [7, 6, 3]
    files = [str(run / f"{label}.png") for label in labels]
    for file, image in zip(files, images, strict=True):
        Image.fromarray(image[..., 0]).save(file)
    assert predict.main([str(run), *files, "--top", "1"]) == 0
    rows = [line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [["7", "32.85%"], ["4", "17.08%"], ["9", "47.58%"]]


def test_a_golden_export_loads(run: Path) -> None:
    model = open_model(run)
    assert (model.step, model.is_mean) == (180, True)
    weights = read_weights(GOLDEN / "model.safetensors")
    params, batch_stats, fresh = from_torch(weights, model.params, model.batch_stats)
    assert fresh == ()
    jax.tree.map(np.testing.assert_array_equal, (params, batch_stats), (model.params, model.batch_stats))
