"""A trained model out of a run's folder: for predictions, exports and evaluations; nothing there is changed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from trjax.batchnorm import fold_batchnorm
from trjax.chain import evaluate_chain
from trjax.checkpoint import Checkpoints, decode
from trjax.config import Config
from trjax.data.augment import normalise
from trjax.data.sources import DataSpec, describe
from trjax.mesh import make_mesh, start_platform
from trjax.program import Program, make_program
from trjax.tables import config_from_table, read_table

Which = Literal["last", "best"]


@dataclass(frozen=True)
class SavedModel:
    """What a run has come to.

    Attributes:
        config: of the run.
        spec: of its data.
        program: of the run on the devices named, not compiled.
        params: `{segment: tree}`, arrays of the host.
        batch_stats: likewise.
        step: of the checkpoint.
        is_mean: these are the running means.
    """

    config: Config
    spec: DataSpec
    program: Program
    params: Any
    batch_stats: Any
    step: int
    is_mean: bool


def open_model(
    folder: Path,
    which: Which = "best",
    raw: bool = False,
    platform: Literal["auto", "cpu", "cuda"] = "cpu",
    devices: str = "0",
) -> SavedModel:
    """Reads a run's model, with its running means in place of the last parameters if it keeps them.

    Args:
        folder: of the run.
        which: checkpoint to read; without any evaluated one the best is the last.
        raw: the last parameters in any case.
        platform: of the devices that it is to run on.
        devices: these.

    Raises:
        ValueError: there is no run, or no whole checkpoint of it.
    """
    file = folder / "config.toml"
    if not file.is_file():
        raise ValueError(f"{folder} holds no run: there is no config.toml in it")
    config = config_from_table(read_table(file), Config(), str(file))
    if not (folder / "checkpoints").is_dir():
        raise ValueError(f"{folder} holds no checkpoint yet")
    checkpoints = Checkpoints(folder / "checkpoints", lambda _: None)
    about = checkpoints.best if which == "best" else None
    about = about or checkpoints.last
    if about is None:
        raise ValueError(f"{folder} holds no checkpoint that is whole")
    start_platform(platform, devices)
    program = make_program(config, make_mesh(devices))
    state = decode(checkpoints.read(about.step), program.forms.saved_shape, str(checkpoints.path(about.step)))
    spec, is_mean = describe(config.data), bool(state.ema) and not raw
    params, batch_stats = (
        (state.ema["params"], state.ema["batch_stats"]) if is_mean else (state.params, state.batch_stats)
    )
    return SavedModel(config, spec, program, params, batch_stats, about.step, is_mean)


def predict(model: SavedModel, images: jax.Array) -> jax.Array:
    """Returns the logits of a block of images, as an evaluation computes them: with BatchNorm folded.

    Args:
        model: a ResNet, not one of the user's own.
        images: uint8, or of the same values, shape (examples, height, width, channels).
    """
    folded, rest = fold_batchnorm(model.params, model.batch_stats)
    pixels = normalise(jnp.asarray(images), model.spec)
    chain = model.program.recipe.chain
    logits = evaluate_chain(chain, folded, rest, pixels)
    if model.config.data.flip_test:
        logits = (logits + evaluate_chain(chain, folded, rest, pixels[:, :, ::-1])) / 2
    return logits


def top_classes(logits: np.ndarray, count: int) -> list[tuple[int, float]]:
    """Returns the classes with the largest probabilities of one example, and these.

    >>> [(index, round(share, 2)) for index, share in top_classes(np.log(np.array([1.0, 6.0, 3.0])), 2)]
    [(1, 0.6), (2, 0.3)]
    """
    shares = np.exp(logits - logits.max())
    shares = shares / shares.sum()
    return [(int(index), float(shares[index])) for index in np.argsort(-shares, kind="stable")[:count]]
