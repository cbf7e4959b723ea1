"""Micro-batches: the gradients of one big batch, one reduction, the memory of one of them."""

import re

import jax
import numpy as np
import pytest
from helpers import (
    dense_chain,
    noise_block,
    one_block_chain,
    plain_gradients,
    reduced_on,
    relative_error,
    tiny_config,
    worst_kind_error,
)  # fmt: skip

from trjax.cost.targets import TARGETS
from trjax.mesh import machine_of
from trjax.models.chain import init_chain
from trjax.step.collectives import sum_moments
from trjax.step.compile import lower_step
from trjax.step.program import Program, make_program
from trjax.step.rules import analyze_step
from trjax.xla.compiled import compile_lowered
from trjax.xla.topology import compile_config, make_topology_mesh

EXACT = 2e-6
"""Relative error that float32 sums in another order may leave, by kind of leaf."""


@pytest.mark.parametrize(
    ("num_devices", "micro_batches"), [(1, 4), pytest.param(2, 3, marks=pytest.mark.fast), (4, 2), (8, 3)]
)
def test_micro_batches_equal_one_big_batch(num_devices: int, micro_batches: int) -> None:
    """The last window is short: 17 of 24 examples, so that a whole micro-batch may be padding."""
    params, batch_stats = init_chain(dense_chain(), jax.random.key(2), (3, 3, 1))
    images, labels, _ = noise_block(5, 24, (3, 3, 1))
    mask = (np.arange(24) < 17).astype(np.float32)
    block = np.where(mask[:, None, None, None] > 0, images, 77).astype(np.float32), labels, mask
    reduced = reduced_on(num_devices, dense_chain(), params, batch_stats, block, micro_batches=micro_batches)
    gradients, _ = plain_gradients(dense_chain(), params, batch_stats, block)
    assert worst_kind_error(reduced, gradients) < EXACT
    assert reduced["results"][3] == 17


def test_synchronised_micro_batches_do_not_depend_on_the_number_of_devices() -> None:
    """A micro-batch is a part of the global batch: the same examples are normalised together on 1, 2 and 4 devices."""
    params, batch_stats = init_chain(dense_chain("local"), jax.random.key(2), (3, 3, 1))
    block = noise_block(5, 24, (3, 3, 1))
    one, *others = (
        reduced_on(number, dense_chain("sync"), params, batch_stats, block, micro_batches=3) for number in (1, 2, 4)
    )
    for other in others:
        assert worst_kind_error(other, {name: leaf for name, leaf in one.items() if name != "results"}) < EXACT
    # running statistics take a step for each micro-batch: their means one after the other, by hand
    whole = reduced_on(1, dense_chain("sync"), params, batch_stats, block)
    name = "middle/norm/running_mean"
    assert relative_error(one, {name: whole[name]}) > 0.1
    stats, means = batch_stats, []
    for at in range(0, 24, 8):
        _, stats_of_one = plain_gradients(dense_chain("local"), params, stats, [leaf[at : at + 8] for leaf in block])
        means.append(stats_of_one[name])
        stats = {**stats, "middle": {"norm": {key.rpartition("/")[2]: leaf for key, leaf in stats_of_one.items()}}}
    assert relative_error(one, {name: means[-1]}) < EXACT


def conv_program(micro_batches: int, global_batch: int) -> Program:
    config = tiny_config(accumulate=micro_batches, global_batch=global_batch, precision="bfloat16")
    mesh = make_topology_mesh(compile_config(TARGETS["h100"]), 1, 2)
    return make_program(config, mesh, one_block_chain(dtype="bfloat16"))


def test_one_reduction_and_the_memory_of_one_micro_batch() -> None:
    made = {count: conv_program(count, 512 * count) for count in (1, 3)}  # 256 examples at a time on a device
    compiled = {count: compile_lowered(lower_step(program)) for count, program in made.items()}
    for count, of_it in compiled.items():
        sums = [operation.size_bytes for operation in of_it.operations if operation.collective]
        assert sums == [group.size_bytes for group in made[count].plan.groups]
        assert len(re.findall(r" all-reduce-start\(|__triton_collective", of_it.text)) == 2  # none in the loop
    gradients = sum(group.size_bytes for group in made[1].plan.groups)
    activations = compiled[1].temp_bytes
    assert activations > 20 * gradients
    images = 3 * 256 * 8 * 8 * 3 * (1 + 2 + 4)  # of all micro-batches, in uint8, bfloat16 and float32
    assert images < 2 * activations / 1.3  # the bound is far from the memory of all of them
    assert compiled[3].temp_bytes < 1.01 * activations + 2 * gradients + images
    found = analyze_step(compiled[3], machine_of(made[3].mesh), 512 * 3)
    deep, first = found.timeline.communications  # behind the rest of the last micro-batch's backward, as with one
    assert not deep.blocking
    assert not first.blocking
    assert any(span.operation.kind == "convolution" for span in deep.overlapped)
    flops = {count: sum(operation.flops for operation in of_it.operations) for count, of_it in compiled.items()}
    assert flops[3] == 3 * flops[1]


def test_steps_of_micro_batches_train(monkeypatch: pytest.MonkeyPatch) -> None:
    from trjax.run.fit import fit

    monkeypatch.setattr("trjax.step.program.make_chain", lambda config, spec: one_block_chain(sum_moments))
    summary = fit(tiny_config(accumulate=3, bn="sync", devices="0-3", workdir="run"))
    assert (summary.finished, summary.step) == (True, 10)
    with pytest.raises(ValueError, match=r"not divisible by world_size=8 times accumulate=2; nearest"):
        fit(tiny_config(accumulate=2, devices="0-7"))
