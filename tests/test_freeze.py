"""Frozen parameters: no gradient, no region, no optimizer state, no backward; and parameters that nothing uses."""

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from helpers import Dense, dense_chain, noise_block, one_block_chain, reduced_on, tiny_config

from trjax.config.presets import preset_config
from trjax.cost.machines import make_machine, parse_topology
from trjax.cost.targets import TARGETS
from trjax.data.batches import train_batches
from trjax.data.sources import load
from trjax.mesh import make_mesh
from trjax.models.chain import init_chain
from trjax.step.compile import lower_step
from trjax.step.program import Program, make_program, shape_run
from trjax.step.run_plan import plan_run
from trjax.trees import name_leaves
from trjax.xla.compiled import compile_lowered


def step(made: Program) -> tuple[Any, Any]:
    config, state = tiny_config(), made.init()
    before = jax.tree.map(np.asarray, state.params)
    (batch,) = train_batches(load(config.data)[0], config.global_batch, 0, 0, 1)
    state, _ = made.train_step(state, made.place_train(batch), np.full(1, 0.1, np.float32), made.votes(False))
    return name_leaves(before), name_leaves(made.layouts.unload(state).params)


@pytest.mark.parametrize("reducer", ["two_group", "zero1"])
def test_frozen_parameters_stay_and_the_others_move(reducer: Any) -> None:
    config = tiny_config(freeze=("first/*", "G_FC_BIAS"), reducer=reducer)
    made = make_program(config, make_mesh("0-1"), dense_chain())
    frozen = {"first/Dense_0/kernel", "first/Dense_0/bias", "last/Dense_0/bias"}
    before, after = step(made)
    assert {name for name in before if np.array_equal(before[name], after[name])} == frozen
    assert made.plan.trained == before.keys() - frozen
    state = name_leaves(made.layouts.saved_shape.opt_state)
    assert not [name for name in state for part in frozen if name.endswith(part)]
    whole = make_program(replace(config, freeze=()), make_mesh("0-1"), dense_chain())
    moved = step(whole)[1]
    for name in made.plan.trained:  # the gradients of the others are what they were
        np.testing.assert_allclose(after[name], moved[name], rtol=1e-6)


def test_freezing_the_stem_removes_its_backward() -> None:
    programs = [
        make_program(tiny_config(freeze=freeze), make_mesh("0-1"), one_block_chain()) for freeze in ((), ("stem/*",))
    ]
    flops = [sum(op.flops for op in compile_lowered(lower_step(made)).operations) for made in programs]
    # 12 images a device: the stem's filter gradient, and the two input gradients of what stands on it. That of the
    # strided 3x3 convolution is computed with the zeros between its pixels; that of the shortcut, which has its own
    # moments' too, with a product of channels.
    stem, above, channels = 64 * 4 * 27, 16 * 8 * 4 + 16 * 4 * 4 + 4 * 16 * 8 * 36, 4 * 8 * 4
    assert flops[0] - flops[1] == 2 * (12 * (stem + above) + channels)
    assert [group.launch_after for group in programs[1].plan.groups] == ["block", "block"]


def test_groups_are_chosen_for_what_is_trained() -> None:
    """Behind a slow link `auto` wants several groups of all gradients; with the deep ones frozen, less is to hide."""
    config = replace(preset_config("imagenet-resnet50"), global_batch=2048, reducer="auto")
    machine = make_machine(TARGETS["h100"], parse_topology("8x1"), link_gbytes=10)
    shapes = shape_run(config)
    counts = {}
    for freeze in ((), ("stage*/conv*", "stage*/layer*/conv*", "stage*/shortcut/conv*")):
        plan = plan_run(replace(config, freeze=freeze), shapes, machine, "OHWI")
        counts[freeze] = len(plan.groups)
        if freeze:
            assert sum(group.size_bytes for group in plan.groups) < 12e6
    assert list(counts.values()) == [4, 2]  # the classifier, early, and the rest


@pytest.mark.parametrize(
    ("freeze", "message"),
    [(("*",), "no parameters to train: .* all are frozen"), (("stage9/*",), "freeze='stage9/\\*' names no parameter")],
)
def test_impossible_freezing(freeze: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_program(tiny_config(freeze=freeze), make_mesh("0"), dense_chain())


class Unused(nn.Module):
    """Has a parameter that never reaches the loss."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array, keys: jax.Array) -> jax.Array:
        self.param("forgotten", nn.initializers.ones, (3,))
        return nn.Dense(6)(x.reshape(x.shape[0], -1))


def test_parameters_that_nothing_uses_get_zero_gradients() -> None:
    chain = {"first": Dense(7), "unused": Unused(), "last": Dense(10, relu=False)}
    params, batch_stats = init_chain(chain, jax.random.key(0), (3, 3, 1))
    reduced = reduced_on(2, chain, params, batch_stats, noise_block(5, 24, (3, 3, 1)))
    np.testing.assert_array_equal(reduced["unused/forgotten"], np.zeros(3))
    assert all(np.any(leaf) for name, leaf in reduced.items() if name != "unused/forgotten")
