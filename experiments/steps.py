"""Running and timing train steps on the devices here."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from trjax.config.run import Config
from trjax.data.batches import count_batches, train_batches
from trjax.data.sources import load
from trjax.mesh import REPLICATED, place
from trjax.step.optim import make_learning_rates
from trjax.step.program import Program
from trjax.step.state import TrainState

WARMUP_STEPS = 3  # to leave out of the times: the first calls fill caches and pools


def place_inputs(config: Config, program: Program) -> tuple[Any, Any, Any]:
    """Returns what a step takes besides the state: the first batch, learning rates of 0.01, and votes."""
    source, _ = load(config.data, config.seed)
    batch = next(train_batches(source, config.global_batch, config.seed, 0, 1, config.last_batch, program.rows))
    rates = place(program.mesh, REPLICATED, np.full(program.num_steps, 0.01, np.float32))
    return program.place_train(batch), rates, program.votes(False)


def train_run(
    config: Config, program: Program, initial: TrainState, seed: int
) -> Iterator[tuple[TrainState, float, float]]:
    """Trains a whole run; yields the state, the seconds and the mean loss of each step.

    The seconds begin when the batch is on the devices, and end when the results are there.

    Args:
        config: of the run.
        program: whose train step runs.
        initial: state, on the host.
        seed: of the order of the examples.
    """
    source, _ = load(config.data)
    steps_per_epoch = count_batches(len(source), config.global_batch)
    rates = make_learning_rates(config.optim, config.epochs, steps_per_epoch, config.global_batch)
    state, votes = jax.device_put(initial, program.layouts.formats), program.votes(False)
    for batch in train_batches(source, config.global_batch, seed, 0, len(rates)):
        placed = jax.block_until_ready(program.place_train(batch))
        start = time.perf_counter()
        state, results = jax.block_until_ready(program.train_step(state, placed, rates, votes))
        yield state, time.perf_counter() - start, float(results[0] / results[3])


def time_calls(calls: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 1) -> dict[str, float]:
    """Returns the median seconds of each call; the calls take turns, so that the machine's noise affects all alike.

    Args:
        calls: by name.
        repeats: turns that count.
        warmup: turns before them, which fill pools.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warmup + repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(taken[warmup:])) for name, taken in seconds.items()}
