"""One process that trains with a step of this package, or an ordinary one; started by `benchmark_step.py`.

It answers every line of a number of steps with the seconds that they took.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from compare_programs import use_ordinary_step

from trjax.config.command_line import parse_config
from trjax.config.run import Config
from trjax.data.batches import train_batches
from trjax.data.sources import load
from trjax.memory import keep_freed
from trjax.mesh import REPLICATED, make_mesh, place, start_platform
from trjax.step.compile import lower_step
from trjax.step.program import Program, make_program


def place_inputs(config: Config, program: Program) -> tuple[Any, Any]:
    """Returns the first batch of a run, and learning rates of 0.01, on the program's devices."""
    source, _ = load(config.data, config.seed)
    batch = next(train_batches(source, config.global_batch, config.seed, 0, 1, config.last_batch, program.rows))
    rates = place(program.mesh, REPLICATED, np.full(program.num_steps, 0.01, np.float32))
    return program.place_train(batch), rates


def serve(way: str, options: Sequence[str]) -> None:
    """Trains on one batch, a number of steps for every line.

    Args:
        way: `trjax`; or `pmean` or `automatic`, see `compare_programs`.
        options: of `trjax.train`.
    """
    config = parse_config(options, "serve_step", "Train on one batch.")
    keep_freed()  # as a run does
    start_platform(config.platform, config.devices)
    mesh = make_mesh(config.devices)
    program = make_program(config, mesh)
    if way != "trjax":
        program = use_ordinary_step(config, program, way)  # type: ignore[arg-type]
    placed, rates = place_inputs(config, program)
    step: Any = lower_step(program).compile()
    state = program.init()
    print(f"jax {jax.__version__}", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            state, results, *_ = step(state, placed, rates, program.votes(False))
            jax.block_until_ready(results)
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
