"""Computing the forward again in the backward: the same numbers, less memory, the collectives that are expected."""

from functools import cache
from typing import Any, Literal

import jax
import numpy as np
import pytest
from helpers import noise_block, one_block_chain, reduced_on, relative_error, spread, tiny_config, worst_kind_error

from trjax.cost.machines import parse_topology
from trjax.cost.targets import TARGETS
from trjax.mesh import machine_of, make_mesh
from trjax.models.chain import Chain, init_chain
from trjax.models.resnet import make_resnet
from trjax.step.collectives import sum_moments
from trjax.step.compile import lower_step
from trjax.step.expected import expect
from trjax.step.program import make_program
from trjax.step.rules import analyze_step
from trjax.xla.compiled import Compiled, compile_lowered
from trjax.xla.topology import compile_config, make_topology_mesh

Remat = Literal["none", "stage", "block"]
EXACT = 2e-6
"""Relative error that another order of float32 sums may leave, by kind of leaf."""


def error(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    assert relative_error(actual, {"results": expected["results"]}) < EXACT
    return worst_kind_error(actual, {name: leaf for name, leaf in expected.items() if name != "results"})


def two_stages(arch: str, **options: Any) -> Chain:
    """The stem, the first two stages and the head of a ResNet: every kind of span, with fewer layers to compile."""
    chain = make_resnet(arch, num_classes=10, **options)
    return {name: segment for name, segment in chain.items() if not name.startswith("stage3")}


@cache
def gradients(bn: str, remat: Remat = "none", drop: float = 0.5) -> dict[str, np.ndarray]:
    """Of two blocks in each stage, with dropout and stochastic depth."""
    reduce = sum_moments if bn == "sync" else None
    chain = two_stages("resnet14", width=4, drop_path=drop, dropout=drop, reduce_moments=reduce)
    params, stats = init_chain(chain, jax.random.key(1), (8, 8, 3))
    return reduced_on(2, chain, spread(params), stats, noise_block(3, 8), remat=remat)


@pytest.mark.parametrize("remat", ["stage", pytest.param("block", marks=pytest.mark.fast)])
@pytest.mark.parametrize("bn", ["local", "sync"])
def test_gradients_do_not_change(remat: Remat, bn: str) -> None:
    """The second forward must draw what the first one drew."""
    assert error(gradients(bn, remat), gradients(bn)) < EXACT


def test_the_model_of_these_gradients_draws() -> None:
    assert abs(gradients("local", drop=0.0)["results"][0] - gradients("local")["results"][0]) > 0.01


def compiled_for_two_gpus(remat: Remat) -> Compiled:
    mesh = make_topology_mesh(compile_config(TARGETS["h100"]), 1, 2)
    config = tiny_config(remat=remat, precision="bfloat16", global_batch=2048)
    chain = two_stages("resnet14", dtype="bfloat16")
    return compile_lowered(lower_step(make_program(config, mesh, chain)))


def test_memory_falls_and_time_rises() -> None:
    whole, stage, block = (compiled_for_two_gpus(remat) for remat in ("none", "stage", "block"))
    assert stage.temp_bytes < 0.75 * whole.temp_bytes
    assert block.temp_bytes < 0.75 * whole.temp_bytes
    flops = [sum(operation.flops for operation in one.operations) for one in (whole, stage, block)]
    assert 1.25 < flops[1] / flops[0] < 1.34  # a third of the convolutions again, but what nobody asks for
    assert flops[2] == pytest.approx(flops[1], rel=0.01)


# Compiling for GPUs takes five times as long as for the CPU. It could merge a forward with its copy: hence slow, too.
@pytest.mark.parametrize("target", [None, pytest.param("h100", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("remat", "arch", "freeze"),
    [
        ("block", "resnet8", ()),
        ("block", "resnet8", ("stem/*", "stage1_block1/*")),
        ("block", "resnet8", ("stem/*", "stage1_block1/layer1/*")),  # recomputed with the block, and asked for nothing
        ("stage", "resnet14", ("stem/*", "stage1_block1/*")),
    ],
)
def test_moments_are_shared_once_more(remat: Remat, arch: str, freeze: tuple[str, ...], target: str | None) -> None:
    mesh = make_topology_mesh(compile_config(TARGETS[target]), 1, 2) if target else make_mesh("0-1")
    config = tiny_config(remat=remat, bn="sync", freeze=freeze)
    program = make_program(config, mesh, two_stages(arch, width=4, reduce_moments=sum_moments))
    expected = expect(config, program.plan, parse_topology("1x2"))
    found = analyze_step(compile_lowered(lower_step(program)), machine_of(mesh), config.global_batch, expected)
    wrong = [verdict.text for verdict in found.verdicts if not verdict.ok]
    assert [text for text in wrong if text.startswith(("collectives", "others"))] == []


def test_a_chain_of_ones_own_is_a_stage_a_segment() -> None:
    chain = one_block_chain()
    params, stats = init_chain(chain, jax.random.key(1), (8, 8, 3))
    block = noise_block(3, 8)
    whole, again = (reduced_on(1, chain, spread(params), stats, block, remat=remat) for remat in ("none", "stage"))
    assert error(again, whole) < EXACT
