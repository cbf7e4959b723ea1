"""From a configuration to a run that can begin: everything checked, the same on all processes, nothing trained yet."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
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
from trjax.run.checkpoints import About, Checkpoints, decode, encode
from trjax.run.processes import broadcast, digest_code, exchange, find_hosts, process_index, require_same
from trjax.run.records import trim_metrics
from trjax.run.workdir import flat_options, lock_workdir, open_workdir, write_config
from trjax.step.limits import count_examples
from trjax.step.options import nccl_settings
from trjax.step.program import Program, make_program
from trjax.step.state import TrainState
from trjax.xla.cache import keep_compiled

Weights = dict[str, np.ndarray]
"""Of a file, by their names."""


@dataclass(frozen=True)
class Start:
    """A run that can begin.

    Attributes:
        workdir: its folder, which process 0 alone writes to.
        program: not compiled yet.
        train_source: examples to learn from.
        test_source: examples to be tested on.
        checkpoints: of the run; None on all processes but the first.
        state: to go on from.
        step: that the state is behind.
        evaluated: the state has been evaluated, if its step is the last one of an epoch.
    """

    workdir: Path
    program: Program
    train_source: Source
    test_source: Source
    checkpoints: Checkpoints | None
    state: TrainState
    step: int
    evaluated: bool


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


def _check_position(config: Config, workdir: Path, about: About, steps_per_epoch: int) -> None:
    """Refuses a checkpoint that does not lie where the data given now and the epochs have it."""
    epoch, batch = about.position["epoch"], about.position["batch"]
    if (epoch, batch) != divmod(about.step, steps_per_epoch):
        raise ValueError(
            f"{workdir} stopped at batch {batch} of epoch {epoch + 1}, which is not step {about.step} of the data "
            "given now: the training set has another size"
        )
    if about.step > config.epochs * steps_per_epoch:
        raise ValueError(f"epochs={config.epochs} end before step {about.step}, where {workdir} is; pass more --epochs")


def _open_checkpoints(config: Config, workdir: Path, steps_per_epoch: int, warn: Callable[[str], None]) -> Checkpoints:
    """Opens the run's checkpoints; one to go on from must be whole, and fit the data, if there is any."""
    checkpoints = Checkpoints(workdir / "checkpoints", warn, config.keep)
    if checkpoints.last is not None:
        _check_position(config, workdir, checkpoints.last, steps_per_epoch)
    elif checkpoints.damaged:
        raise ValueError(
            f"none of the checkpoints in {checkpoints.folder} is whole; use another --workdir, or move them away "
            "to start anew"
        )
    return checkpoints


def _read_weights(config: Config) -> Weights | None:
    """Returns the weights that a run begins with; none if it goes on, or begins without.

    Raises:
        ValueError: they cannot be read.
    """
    goes_on = config.workdir and any(Path(config.workdir, "checkpoints").glob("*.safetensors"))
    return read_weights(Path(config.init_from)) if config.init_from and not goes_on else None


def _initial_state(
    program: Program, init_from: str, weights: Weights | None, warn: Callable[[str], None]
) -> TrainState:
    """Returns the state of a run that begins, arrays of the host: fresh, or with weights of a file."""
    whole = program.layouts.unload(program.layouts.init())
    state: TrainState = jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), whole)
    if weights is None:
        return state
    try:
        params, batch_stats, stayed = from_torch(weights, state.params, state.batch_stats)
    except ValueError as error:
        raise ValueError(f"init_from={init_from}: {error}") from error
    if stayed:
        warn(f"{init_from} has no {', '.join(stayed)} of this size: these begin anew")
    ema = {"params": params, "batch_stats": batch_stats} if state.ema else {}
    return replace(state, params=params, batch_stats=batch_stats, ema=ema)


def _first_state(
    program: Program,
    checkpoints: Checkpoints | None,
    init_from: str,
    weights: Weights | None,
    warn: Callable[[str], None],
) -> tuple[TrainState, int, bool]:
    """Returns the state to go on from, its step, and whether it has been evaluated; process 0 sends it to all.

    It is the last checkpoint's, or a fresh one.

    The initial state is sent too: machines of different kinds need not compute the same bits.
    """
    forms = program.layouts
    last = checkpoints.last if checkpoints else None
    due = last is not None and last.test_top1 is None and last.position["batch"] == 0
    step, evaluated = json.loads(exchange("step", json.dumps([last.step if last else -1, not due]))[0])
    data = checkpoints.read(step) if checkpoints and last else b""
    if step < 0 and jax.process_count() == 1 and weights is None:
        return forms.init(), 0, True
    if step < 0:
        state = _initial_state(program, init_from, weights, warn)  # process 0 alone has them
        data = encode(state, About(0, {}, {}, None))
    where = f"the checkpoint in {checkpoints.folder}" if checkpoints else "the state of process 0"
    return forms.load(decode(broadcast(data), forms.saved_shape, where)), max(step, 0), evaluated


def _keep_compiled(config: Config, workdir: Path, leaving: ExitStack, warn: Callable[[str], None]) -> None:
    """Keeps compiled programs beside the run's folder until `leaving`, if that can be.

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
def start_run(
    config: Config,
    chain: Chain | None,
    optimizer: optax.GradientTransformation | None,
    warn: Callable[[str], None],
) -> Iterator[Start]:
    """Gives a run that can begin, with its folder locked.

    Args:
        config: the run.
        chain: a model of one's own in place of the configured ResNet.
        optimizer: one's own in place of the configured one.
        warn: told of damaged checkpoints and records.

    Raises:
        ValueError: something the user gave cannot be, or the processes do not agree.
    """
    require_same("facts", _facts(config))
    start_platform(config.platform, config.devices, nccl_settings(config))
    mesh = make_mesh(config.devices, config.hosts, find_hosts())
    program, (train_source, test_source) = make_program(config, mesh, chain, optimizer), _load(config)
    plan = hashlib.sha256(repr(program.plan).encode()).hexdigest()[:12]
    sizes = [len(train_source), len(test_source)]
    require_same("plan", {"the plan": plan, "training and test examples": sizes, "devices": jax.local_device_count()})
    if process_index():
        workdir = Path(exchange("workdir", "")[0])
        yield Start(workdir, program, train_source, test_source, None, *_first_state(program, None, "", None, warn))
        return
    weights = _read_weights(config)  # before there is a folder: what cannot be read leaves none
    workdir = open_workdir(config)
    with (
        lock_workdir(workdir),
        closing(_open_checkpoints(config, workdir, program.steps_per_epoch, warn)) as checkpoints,
        ExitStack() as leaving,
    ):
        write_config(config, workdir)
        exchange("workdir", str(workdir))
        _keep_compiled(config, workdir, leaving, warn)
        state, step, evaluated = _first_state(program, checkpoints, config.init_from, weights, warn)
        if aside := trim_metrics(workdir / "metrics.jsonl", step):
            warn(f"metrics.jsonl held more than the records of a run; all of it is kept as {aside}")
        yield Start(workdir, program, train_source, test_source, checkpoints, state, step, evaluated)
