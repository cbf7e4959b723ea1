"""The parts of a train step as programs of their own, timed on the devices here: `overlap.py` compares them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from steps import place_inputs, time_calls

from trjax.config.run import Config, Reducing
from trjax.data.augment import make_augment
from trjax.data.batches import Batch, Inputs
from trjax.data.sources import describe
from trjax.mesh import REPLICATED, SPLIT, placement
from trjax.models.chain import Chain, apply_chain, segment_keys
from trjax.step.backward import packed_backward
from trjax.step.compile import lower_step
from trjax.step.options import probe_options
from trjax.step.program import Program, make_program
from trjax.step.scores import score
from trjax.step.spec import StepInputs, TrainStep
from trjax.step.update import make_train_step

Call = Callable[[], Any]


def keep(buffer: jax.Array, after: jax.Array | None) -> jax.Array:
    """Sums nothing: the launch of a step that only computes, in the same order."""
    return buffer if after is None else jax.lax.optimization_barrier((after, buffer))[1]


def make_compute_step(program: Program) -> TrainStep:
    """Returns the program's train step without its sums; every device keeps gradients of its own."""
    spec = replace(program.spec, gradients=replace(program.gradients, launch=keep), written_out=True)
    return make_train_step(spec, program.mesh, program.layouts)


def make_parts(config: Config, program: Program) -> tuple[Any, Any]:
    """Returns the forward alone and forward with backward, jitted: `(params, batch_stats, batch)`, nothing summed."""
    augment = make_augment(config.data, describe(config.data), config.seed)

    def prepare(block: Batch) -> Inputs:
        return augment(block, jnp.int32(0))

    def forward(params: Any, batch_stats: Any, block: Batch) -> Any:
        chain, images = program.gradients.chain, prepare(block).images
        keys = segment_keys(chain, jax.random.key(0), block.indices)
        x, stats = apply_chain(chain, params, images, batch_stats=batch_stats, train=True, mask=block.mask, keys=keys)
        return score(x, block.labels, block.mask)[1], stats

    def backward(params: Any, batch_stats: Any, block: Batch) -> Any:
        inputs = StepInputs(params, batch_stats, jax.random.key(0))
        return [buffer for _, buffer in packed_backward(program.gradients, inputs, block, prepare)]

    specs = (REPLICATED, REPLICATED, SPLIT)
    over = partial(jax.shard_map, mesh=program.mesh, in_specs=specs, out_specs=SPLIT, check_vma=False)
    options = probe_options(program.mesh).accepted
    return jax.jit(over(forward), compiler_options=options), jax.jit(over(backward), compiler_options=options)


def make_sums(program: Program) -> Any:
    """Returns the sums of a step alone, jitted: from the groups' buffers to their sums."""

    def sums(buffers: list[jax.Array]) -> list[jax.Array]:
        previous, found = None, []
        for buffer in buffers:
            previous = program.gradients.launch(buffer, previous)
            found.append(previous)
        return found

    step = jax.shard_map(sums, mesh=program.mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False)
    return jax.jit(step, compiler_options=probe_options(program.mesh).accepted)


def repeat_step(step: Any, program: Program, initial: Any, inputs: Sequence[Any]) -> Call:
    """Returns a call that does one more step."""
    state = jax.device_put(initial, program.layouts.formats)

    def call() -> Any:
        nonlocal state
        state, results = step(state, *inputs)
        return state, results

    return call


def time_parts(
    config: Config, chain: Chain | None, mesh: Mesh, reducers: Sequence[Reducing], repeats: int
) -> dict[str, float]:
    """Returns the milliseconds of `forward`, `backward` (with the forward), `compute` and, by reducer, sums and steps.

    Args:
        config: the run.
        chain: a model other than the configured one.
        mesh: of the devices here.
        reducers: ways to sum; timed as `NAME sums` and `NAME step`.
        repeats: timed calls of each part.
    """
    programs = {name: make_program(replace(config, reducer=name), mesh, chain) for name in reducers}
    program = programs["two_group"]
    initial, inputs = jax.device_get(program.init()), place_inputs(config, program)
    whole = jax.device_put((initial.params, initial.batch_stats), placement(mesh, REPLICATED))
    forward, backward = make_parts(config, program)
    calls: dict[str, Call] = {
        "forward": partial(forward, *whole, inputs[0]),
        "backward": partial(backward, *whole, inputs[0]),
        "compute": repeat_step(make_compute_step(program), program, initial, inputs),
    }
    for name, own in programs.items():
        buffers = [np.zeros(mesh.size * group.size_elements, group.dtype) for group in own.plan.groups]
        calls[f"{name} sums"] = partial(make_sums(own), jax.device_put(buffers, placement(mesh, SPLIT)))
        calls[f"{name} step"] = repeat_step(lower_step(own).compile(), own, initial, inputs)
    return {name: 1e3 * seconds for name, seconds in time_calls(calls, repeats, warmup=2).items()}
