"""One flag decides: a step whose gradients are not finite changes nothing, on any device, with any reducer."""

from dataclasses import replace
from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Dense, tiny_config, tiny_program

from trjax.config.run import OptimConfig, Reducing
from trjax.data.batches import Batch, train_batches
from trjax.data.sources import load
from trjax.mesh import make_mesh
from trjax.step.plan import NUM_SCORES
from trjax.step.program import Program, make_program

REDUCERS: tuple[Reducing, ...] = (
    "two_group", "auto", "single", "per_leaf", "ddp", "ring", "hierarchical", "zero1",
)  # fmt: skip


class Odd(nn.Module):
    """Adds nothing to its input; the gradient of its parameter, and that alone, is not a number where it is zero."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array, keys: jax.Array) -> jax.Array:
        odd = self.param("odd", nn.initializers.ones, (3,))
        return x + 0 * jnp.sqrt(odd).sum()


@cache
def odd_program(reducer: Reducing, num_devices: int = 4, **changes: Any) -> Program:
    chain = {"first": Dense(7, norm="local"), "odd": Odd(), "last": Dense(10, relu=False)}
    config = tiny_config(reducer=reducer, optim=OptimConfig(clip_norm=1.0), **changes)
    return make_program(config, make_mesh(f"0-{num_devices - 1}", 2), chain)


def one_batch() -> Batch:
    config = tiny_config()
    (batch,) = train_batches(load(config.data)[0], config.global_batch, 0, 0, 1)
    return batch


def step(program: Program, state: Any, rates: Any = (0.1,), stop: bool = False) -> tuple[Any, np.ndarray]:
    placed = program.place_train(one_batch())
    state, outcome = program.train_step(state, placed, np.asarray(rates, np.float32), program.votes(stop))
    return state, np.asarray(outcome)


def spoiled(program: Program, state: Any) -> Any:
    """The same state with zeros in the one parameter: three values, in the shards of some devices only."""
    host = jax.device_get(program.layouts.unload(state))
    return program.layouts.load(replace(host, params={**host.params, "odd": {"odd": np.zeros(3, np.float32)}}))


@pytest.mark.parametrize("reducer", REDUCERS)
def test_a_step_that_is_not_finite_changes_nothing(reducer: Reducing) -> None:
    program = odd_program(reducer)
    good, outcome = step(program, program.init())
    assert (outcome[-1], int(good.step), int(good.skipped)) == (0, 1, 0)
    state = spoiled(program, good)
    before = jax.device_get(state)
    after, outcome = step(program, state)
    assert outcome[-1] == 1
    assert outcome[3] == 24
    assert (int(after.step), int(after.skipped)) == (2, 1)
    for leaf, kept in zip(jax.tree.leaves(after)[:-2], jax.tree.leaves(before)[:-2], strict=True):
        assert np.isfinite(kept).all()
        for shard in leaf.addressable_shards:  # every device's own
            np.testing.assert_array_equal(shard.data, kept[shard.index])


def test_micro_batches_decide_together() -> None:
    program = odd_program("two_group", accumulate=3)
    state = spoiled(program, step(program, program.init())[0])
    before = jax.device_get(state)
    after, outcome = step(program, state)
    assert outcome[-1] == 1
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(after)[:-2], jax.tree.leaves(before)[:-2])


def test_the_schedule_waits_too() -> None:
    """Behind one skipped batch of four, the fourth good one takes the third rate."""
    program = tiny_program(2)
    for index, moves in ((2, True), (3, False)):
        state = replace(jax.device_get(program.init()), step=np.int32(3), skipped=np.int32(1))
        rates = np.zeros(5, np.float32)
        rates[index] = 0.1
        after, _ = step(program, program.layouts.load(state), rates)
        pairs = zip(jax.tree.leaves(after.params), jax.tree.leaves(state.params), strict=True)
        changed = [not np.array_equal(a, b) for a, b in pairs]
        assert any(changed) == moves


@pytest.mark.parametrize("reducer", ["two_group", "zero1"])
def test_all_devices_learn_of_a_vote_with_the_step(reducer: Reducing) -> None:
    program = odd_program(reducer)
    assert [step(program, program.init(), stop=stop)[1][NUM_SCORES] for stop in (False, True)] == [0, 4]
