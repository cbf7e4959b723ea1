"""A trained model read from a run's folder, for predictions, exports and evaluations; the folder stays as it is."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from trjax.config.run import Config
from trjax.data.augment import normalise
from trjax.data.sources import describe, load
from trjax.data.spec import DataSpec
from trjax.mesh import Platform, make_mesh, start_platform
from trjax.run.checkpoints import Checkpoints, decode
from trjax.run.evaluation import evaluate_source
from trjax.run.workdir import check_same_run, read_config
from trjax.step.compile import compile_evaluation
from trjax.step.evaluation import evaluate_folded
from trjax.step.program import Program, make_program
from trjax.step.state import TrainState, models_of

Which = Literal["last", "best"]


@dataclass(frozen=True)
class SavedModel:
    """The model of a run's checkpoint.

    Attributes:
        config: of the run.
        spec: of its data.
        program: of the run on one device, not compiled.
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


def read_state(
    folder: Path, which: Which | int, platform: Platform = "cpu", devices: str = "0"
) -> tuple[Config, Program, TrainState, int]:
    """Reads a checkpoint of a run: its options, its program, not compiled, its state, arrays of the host, and its step.

    Args:
        folder: of the run.
        which: checkpoint to read, also by its step; without any evaluated one the best is the last.
        platform: of the devices that the program is for.
        devices: these.

    Raises:
        ValueError: there is no run, or no whole checkpoint of it.
    """
    config = read_config(folder)
    if not (folder / "checkpoints").is_dir():
        raise ValueError(f"{folder} holds no checkpoint yet")
    checkpoints = Checkpoints(folder / "checkpoints", lambda _: None)
    info = checkpoints.found.get(which) if isinstance(which, int) else checkpoints.last
    if which == "best":
        info = checkpoints.best or info
    if info is None:
        wanted = f" of step {which}" if isinstance(which, int) else ""
        raise ValueError(f"{folder} holds no checkpoint{wanted} that is whole")
    start_platform(platform, devices)
    program = make_program(config, make_mesh(devices))
    data = checkpoints.read(info.step)
    return config, program, decode(data, program.layouts.saved_shape, str(checkpoints.path(info.step))), info.step


def open_model(folder: Path, which: Which = "best", raw: bool = False) -> SavedModel:
    """Reads a run's model, with its running means in place of the last parameters if it keeps them.

    Args:
        folder: of the run.
        which: checkpoint to read, see `read_state`.
        raw: the last parameters in any case.

    Raises:
        ValueError: there is no run, or no whole checkpoint of it.
    """
    config, program, state, step = read_state(folder, which)
    models = models_of(state)
    name = "ema" if "ema" in models and not raw else "test"
    return SavedModel(config, describe(config.data), program, *models[name], step, name == "ema")  # type: ignore[index]


def evaluate_run(config: Config) -> list[str]:
    """Evaluates a run's model, and its running means if it keeps them; changes nothing in its folder.

    Returns:
        A line for each.

    Raises:
        ValueError: there is no such run, or it has other options.
    """
    if not config.workdir:
        raise ValueError("eval_only: which run? Pass its --workdir")
    check_same_run(config, Path(config.workdir))
    saved, program, state, step = read_state(Path(config.workdir), "last", config.platform, config.devices)
    source = load(replace(saved.data, root=config.data.root))[1]
    program, lines = compile_evaluation(program), []
    formats = (program.layouts.formats.params, program.layouts.formats.batch_stats)
    for split, model in models_of(state).items():
        scores = evaluate_source(program, source, saved.global_batch, *jax.device_put(model, formats))
        assert scores is not None
        loss, top1, top5 = scores[:3] / scores[3]
        name = {"test": "parameters", "ema": "running means"}[split]
        numbers = f"loss {loss:.4f}  top-1 {top1:.2%}  top-5 {top5:.2%}"
        lines.append(f"step {step}, {name}: {numbers} of {scores[3]:,.0f} examples")
    return lines


def predict(model: SavedModel, images: jax.Array) -> jax.Array:
    """Returns the logits of a block of images, as an evaluation computes them: with BatchNorm folded.

    Args:
        model: a ResNet, not one of the user's own.
        images: uint8, or of the same values, shape (examples, height, width, channels).
    """
    pixels, flip = normalise(jnp.asarray(images), model.spec), model.config.data.flip_test
    return evaluate_folded(model.program.gradients.chain, model.params, model.batch_stats, pixels, flip)


def top_classes(logits: np.ndarray, count: int) -> list[tuple[int, float]]:
    """Returns the classes with the largest probabilities of one example, and these.

    >>> [(index, round(share, 2)) for index, share in top_classes(np.log(np.array([1.0, 6.0, 3.0])), 2)]
    [(1, 0.6), (2, 0.3)]
    """
    shares = np.exp(logits - logits.max())
    shares = shares / shares.sum()
    return [(int(index), float(shares[index])) for index in np.argsort(-shares, kind="stable")[:count]]
