"""One process that trains with a step of this package, or an ordinary one; started by `benchmark_step.py`.

It answers every line of a number of steps with the seconds that they took.
"""

import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

import jax
from compare_programs import use_ordinary_step
from steps import place_inputs

from trjax.config.command_line import parse_options
from trjax.config.run import Config
from trjax.memory import keep_freed
from trjax.mesh import make_mesh, start_platform
from trjax.step.compile import lower_step
from trjax.step.program import make_program


@dataclass(frozen=True)
class Options:
    """Options besides those of `trjax.train`."""

    way: Literal["trjax", "pmean", "automatic"] = "trjax"
    """How the step is written: `trjax`, or one of the ordinary ways in `compare_programs`."""


def serve(config: Config, way: Literal["trjax", "pmean", "automatic"]) -> None:
    """Trains on one batch: reads numbers of steps, one a line, and answers each with the seconds that they took."""
    keep_freed()  # as a run does
    start_platform(config.platform, config.devices)
    mesh = make_mesh(config.devices)
    program = make_program(config, mesh)
    if way != "trjax":
        program = use_ordinary_step(config, program, way)
    inputs = place_inputs(config, program)
    step: Any = lower_step(program).compile()
    state = program.init()
    print(f"jax {jax.__version__}", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            state, results, *_ = step(state, *inputs)
            jax.block_until_ready(results)
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    run, options = parse_options(sys.argv[1:], "serve_step", "Train on one batch.", Options())
    serve(run, options.way)
