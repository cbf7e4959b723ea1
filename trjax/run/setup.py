"""From a configuration to a run that can start: everything is checked and the same on all processes."""

import hashlib
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from trjax.config.run import Config
from trjax.data.sources import FirstOf, Source, describe, load
from trjax.mesh import make_mesh, start_platform
from trjax.models.chain import Chain
from trjax.models.weights import from_torch, read_weights
from trjax.run.checkpoints import CheckpointInfo, Checkpoints, decode, encode
from trjax.run.context import RunSetup
from trjax.run.processes import broadcast, digest_code, exchange, process_index, require_same
from trjax.run.records import trim_metrics
from trjax.run.workdir import flat_options, lock_workdir, open_workdir, write_config
from trjax.step.limits import count_examples
from trjax.step.options import nccl_settings
from trjax.step.program import Program, make_program
from trjax.step.state import TrainState
from trjax.xla.cache import keep_compiled

Weights = dict[str, np.ndarray]
"""Arrays of a file, by their names."""
Warn = Callable[[str], None]
"""Is called with a message for the user."""


def _facts(config: Config) -> dict[str, Any]:
    """Returns what the processes of a run must have in common before they start a platform."""
    own = {"workdir", "data.root", "init_from"}  # paths may differ from machine to machine
    options = {name: value for name, value in flat_options(asdict(config)).items() if name not in own}
    return {"trjax's code": digest_code(), "jax": version("jax"), **options}


def _load(config: Config) -> tuple[Source, Source]:
    """Returns the training and the test source.

    Raises:
        ValueError: they cannot be loaded, or are not of the size that was planned for.
    """
    sources, spec = load(config.data, config.seed), describe(config.data)
    found, expected = [len(source) for source in sources], [spec.train_examples, spec.test_examples]
    if found != expected:
        raise ValueError(f"data.source={config.data.source}: {found} training and test examples, not {expected}")
    if not config.overfit_batches:
        return sources
    few = FirstOf(sources[0], count_examples(config, spec))
    return few, few


def _check_position(config: Config, workdir: Path, info: CheckpointInfo, steps_per_epoch: int) -> None:
    """Raises ValueError if the position of a checkpoint does not fit the data given now, or the epochs."""
    epoch, batch = info.position["epoch"], info.position["batch"]
    if (epoch, batch) != divmod(info.step, steps_per_epoch):
        raise ValueError(
            f"{workdir} stopped at batch {batch} of epoch {epoch + 1}, which is not step {info.step} of the data "
            "given now: the training set has another size"
        )
    if info.step > config.epochs * steps_per_epoch:
        raise ValueError(f"epochs={config.epochs} end before step {info.step}, where {workdir} is; pass more --epochs")


def _open_checkpoints(config: Config, workdir: Path, steps_per_epoch: int, warn: Warn) -> Checkpoints:
    """Opens the run's checkpoints; if there are any, one must be whole, and the last of these must fit the data."""
    checkpoints = Checkpoints(workdir / "checkpoints", warn, config.keep)
    if checkpoints.last is not None:
        _check_position(config, workdir, checkpoints.last, steps_per_epoch)
    elif checkpoints.damaged:
        raise ValueError(
            f"none of the checkpoints in {checkpoints.folder} is whole; use another --workdir, or move them away "
            "to start again"
        )
    return checkpoints


def _read_weights(config: Config) -> Weights | None:
    """Returns the weights that a new run starts from; None if the run resumes, or names no file.

    Raises:
        ValueError: they cannot be read.
    """
    resumes = config.workdir and any(Path(config.workdir, "checkpoints").glob("*.safetensors"))
    return read_weights(Path(config.init_from)) if config.init_from and not resumes else None


def _initial_state(program: Program, init_from: str, weights: Weights | None, warn: Warn) -> TrainState:
    """Returns the initial state, arrays of the host: random parameters, or those of a file."""
    whole = program.layouts.unload(program.layouts.init())
    state: TrainState = jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), whole)
    if weights is None:
        return state
    try:
        params, batch_stats, stayed = from_torch(weights, state.params, state.batch_stats)
    except ValueError as error:
        raise ValueError(f"init_from={init_from}: {error}") from error
    if stayed:
        warn(f"{init_from} has no {', '.join(stayed)} of this size: these start from random values")
    ema = {"params": params, "batch_stats": batch_stats} if state.ema else {}
    return replace(state, params=params, batch_stats=batch_stats, ema=ema)


def _first_state(
    config: Config, program: Program, checkpoints: Checkpoints | None, weights: Weights | None, warn: Warn
) -> tuple[TrainState, int, bool]:
    """Returns the last checkpoint's state, or an initial one, its step, and whether that has been evaluated.

    Process 0 sends it to all, an initial state too: machines of different kinds need not compute the same bits.
    """
    layouts, last = program.layouts, checkpoints.last if checkpoints else None
    due = last is not None and last.test_top1 is None and last.position["batch"] == 0
    step, evaluated = json.loads(exchange("step", json.dumps([last.step if last else -1, not due]))[0])
    if step < 0 and jax.process_count() == 1 and weights is None:
        return layouts.init(), 0, True
    if step < 0:
        data = encode(_initial_state(program, config.init_from, weights, warn), CheckpointInfo(0, {}, {}, None))
    else:
        data = checkpoints.read(step) if checkpoints else b""
    where = f"the checkpoint in {checkpoints.folder}" if checkpoints else "the state of process 0"
    return layouts.load(decode(broadcast(data), layouts.saved_shape, where)), max(step, 0), evaluated


def _keep_compiled(config: Config, workdir: Path, leaving: ExitStack, warn: Warn) -> None:
    """Caches compiled programs beside the run's folder until `leaving`, if that is possible.

    Not with several processes: JAX writes from the first alone, and those that load and those that compile would wait
    for each other.
    """
    if not config.keep_compiled or jax.process_count() > 1:
        return
    try:
        leaving.enter_context(keep_compiled(workdir.resolve().parent))
    except OSError as error:
        warn(f"compiled programs are not kept: {error}")


@contextmanager
def set_up_run(
    config: Config, chain: Chain | None, optimizer: optax.GradientTransformation | None, warn: Warn
) -> Iterator[RunSetup]:
    """Gives a run that can start, with its folder locked.

    Args:
        config: the run.
        chain: a model that replaces the configured ResNet.
        optimizer: replaces the configured one.
        warn: is called with a message about each damaged file.

    Raises:
        ValueError: an option or a file cannot be used, or the processes do not agree.
    """
    require_same("facts", _facts(config))
    start_platform(config.platform, config.devices, nccl_settings(config))
    mesh = make_mesh(config.devices, config.hosts, exchange("host", socket.gethostname()))
    program, sources = make_program(config, mesh, chain, optimizer), _load(config)
    plan = hashlib.sha256(repr(program.plan).encode()).hexdigest()[:12]
    sizes = [len(source) for source in sources]
    require_same("plan", {"the plan": plan, "training and test examples": sizes, "devices": jax.local_device_count()})
    checkpoints, weights, folder = None, None, ""
    with ExitStack() as leaving:
        if process_index() == 0:
            weights = _read_weights(config)  # before there is a folder: a file that cannot be read leaves none
            workdir = open_workdir(config)
            leaving.enter_context(lock_workdir(workdir))
            checkpoints = _open_checkpoints(config, workdir, program.steps_per_epoch, warn)
            leaving.callback(checkpoints.close)
            write_config(config, workdir)
            _keep_compiled(config, workdir, leaving, warn)
            folder = str(workdir)
        workdir = Path(exchange("workdir", folder)[0])
        state, step, evaluated = _first_state(config, program, checkpoints, weights, warn)
        if checkpoints and (aside := trim_metrics(workdir / "metrics.jsonl", step)):
            warn(f"metrics.jsonl held more than the records of a run; all of it is kept as {aside}")
        yield RunSetup(config, workdir, program, *sources, checkpoints, state, step, evaluated)
