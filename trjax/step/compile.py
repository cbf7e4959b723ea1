"""The programs of a run, compiled once: what is needed first at once, the rest while that runs."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import numpy as np
from jax.stages import Wrapped

from trjax.memory import require_device
from trjax.step.limits import SMALLER
from trjax.step.program import Program


class Deferred:
    """Called as the function itself; the first call waits until it is there, and raises what its making raised."""

    def __init__(self, make: Callable[[], Any], maker: ThreadPoolExecutor) -> None:
        """Starts to make it, after everything that the maker was given before.

        Args:
            make: returns the function.
            maker: a thread for it.
        """
        self._made = maker.submit(make)

    def __call__(self, *arguments: Any) -> Any:
        """Calls it."""
        return self._made.result()(*arguments)

    def __getattr__(self, name: str) -> Any:
        """Returns what the function says of itself."""
        return getattr(self._made.result(), name)


def lower_step(program: Program, size: int = 0, dispatch: int = 1) -> Any:
    """Returns the train step lowered for the program's shapes, ready to compile; no device computes.

    Args:
        program: whose step.
        size: that of images resized to this side; 0: as they are.
        dispatch: steps of one call; of several, those of images as they are.
    """
    step, batch = cast(Wrapped, program.steps[size, dispatch]), program.batch_shape
    if dispatch > 1:
        batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((dispatch, *leaf.shape), leaf.dtype), batch)
    rates, votes = (jax.ShapeDtypeStruct((count,), np.float32) for count in (program.num_steps, program.mesh.size))
    return step.lower(program.layouts.shape, batch, rates, votes)


def needed_bytes(step: Any) -> int:
    """Returns what a compiled step needs on a device: arguments, results in places of their own, all in between."""
    memory = step.memory_analysis()
    results_bytes = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.argument_size_in_bytes + memory.temp_size_in_bytes + results_bytes)


def _check_memory(program: Program, step: Any) -> None:
    """Raises ValueError if a compiled step does not fit."""
    batch = math.prod(program.batch_shape.labels.shape)
    require_device(f"global_batch={batch}", program.mesh, needed_bytes(step), SMALLER)


def compile_evaluation(program: Program) -> Program:
    """Returns the program with its evaluation compiled."""
    state, batch, totals = program.layouts.shape, program.eval_batch_shape, program.totals_shape
    return replace(
        program,
        accumulate=cast(Wrapped, program.accumulate).lower(totals, state.params, state.batch_stats, batch).compile(),
        reduce_totals=cast(Wrapped, program.reduce_totals).lower(totals).compile(),
    )


def compile_program(
    program: Program, sizes: Sequence[int] = (0,), maker: ThreadPoolExecutor | None = None, dispatch: int = 1
) -> Program:
    """Returns the program with its steps and its evaluation compiled, once for the whole run.

    A compiled function refuses any other shape, type or placement: nothing can compile again unnoticed.

    Args:
        program: to compile.
        sizes: sides to which the run resizes its images, as it needs them; 0: as they are.
        maker: compiles the steps for all but the first of them, while the run goes on.
        dispatch: steps of one call, beside those of one step each.

    Raises:
        ValueError: the first step does not fit into memory.
    """

    def compile_step(size: int, dispatch: int = 1) -> Any:
        step = lower_step(program, size, dispatch).compile()
        _check_memory(program, step)
        return step

    first, *others = sizes
    steps = {(first, 1): compile_step(first)}
    for size in others:
        steps[size, 1] = Deferred(partial(compile_step, size), maker) if maker else compile_step(size)
    if dispatch > 1:
        steps[0, dispatch] = compile_step(0, dispatch)
    return replace(compile_evaluation(program), steps=steps)
