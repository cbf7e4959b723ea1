"""Sharded updates equal whole ones, take 1/N of the memory, and save what the whole ones save."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import dense_chain, tiny_config

from trjax.config.run import OptimConfig
from trjax.data.batches import train_batches
from trjax.data.sources import load
from trjax.mesh import make_mesh
from trjax.run.checkpoints import CheckpointInfo, Checkpoints, decode
from trjax.step.compile import lower_step
from trjax.step.optim import clip_by_global_norm, scale_by_lars, scale_by_trust_ratio
from trjax.step.program import Program, make_program
from trjax.step.zero import check_elementwise
from trjax.xla.compiled import compile_lowered

OPTIMIZERS = {
    "sgd": OptimConfig(learning_rate=0.1, weight_decay=0.1, ema_decay=0.9),
    "adamw": OptimConfig(kind="adamw", weight_decay=0.1),
    "lars": OptimConfig(kind="lars", weight_decay=0.1, trust=0.1, clip_norm=0.5),
    "lamb": OptimConfig(kind="lamb", weight_decay=0.1),
}
EXACT = 2e-6
"""Of three updates, relative to the largest parameter: sums in another order."""


@cache
def program(reducer: Any, kind: str, num_devices: int) -> Program:
    config = tiny_config(reducer=reducer, optim=OPTIMIZERS[kind])
    # Adam makes a full step of a gradient that is rounding alone, that of a bias before a normalisation.
    chain = dense_chain("none" if kind in ("adamw", "lamb") else "sync")
    return make_program(config, make_mesh(f"0-{num_devices - 1}"), chain)


def run(made: Program, state: Any, num_steps: int = 3) -> Any:
    """Three steps, the last batch partial."""
    config = tiny_config()
    for batch in train_batches(load(config.data)[0], config.global_batch, 0, 5 - num_steps, 5):
        state, _ = made.train_step(state, made.place_train(batch), np.full(1, 0.1, np.float32), made.votes(False))
    return state


@pytest.mark.parametrize(
    ("kind", "num_devices"),
    [("sgd", 1), ("sgd", 8), pytest.param("adamw", 3, marks=pytest.mark.fast), ("lars", 3), ("lars", 8), ("lamb", 3)],
)
def test_sharded_updates_equal_whole_ones(kind: str, num_devices: int) -> None:
    sharded, whole = program("zero1", kind, num_devices), program("two_group", kind, num_devices)
    found, expected = sharded.layouts.unload(run(sharded, sharded.init())), run(whole, whole.init())
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=EXACT * max(1, np.abs(b).max())), found, expected)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), found.params, whole.init().params)
    assert sorted(jax.tree.leaves(moved))[1] > 1e-4  # undecayed vectors included; a bias before BatchNorm does nothing


def test_norms_of_shards_alone_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trjax.step.collectives.sum_norms", lambda squares: squares)
    program.cache_clear()
    try:
        with pytest.raises(AssertionError):
            test_sharded_updates_equal_whole_ones("lars", 3)
    finally:
        program.cache_clear()


def test_each_device_keeps_its_part_of_the_optimizer_state() -> None:
    whole, sharded = program("two_group", "adamw", 8), program("zero1", "adamw", 8)
    sizes = [leaf.size for leaf in jax.tree.leaves(whole.layouts.shape.params)]
    moments = [leaf for leaf in jax.tree.leaves(sharded.init().opt_state) if leaf.ndim]
    assert sorted(leaf.size for leaf in moments) == sorted([8 * -(-size // 8) for size in sizes] * 2)
    assert {leaf.addressable_shards[3].data.size * 8 / leaf.size for leaf in moments} == {1.0}
    arguments = [compile_lowered(lower_step(made)).argument_bytes for made in (whole, sharded)]
    saved = 2 * 4 * sum(size - -(-size // 8) for size in sizes)
    assert arguments[0] - arguments[1] == pytest.approx(saved, rel=0.01)  # alignment


def test_checkpoints_are_the_same_for_every_reducer(tmp_path: Path) -> None:
    """Three steps in shards on three devices, then one on two whole; and back."""
    sharded, whole = program("zero1", "adamw", 3), program("two_group", "adamw", 3)
    for first, then in ((sharded, whole), (whole, sharded)):
        checkpoints = Checkpoints(tmp_path / f"from{first is whole}", print)
        state = run(first, first.init())
        checkpoints.save(first.layouts.unload(state), CheckpointInfo(3, {}, {}, None))
        checkpoints.wait()
        restored = decode(checkpoints.read(3), then.layouts.saved_shape, "it")
        assert {leaf.shape for leaf in jax.tree.leaves(restored)} == {
            leaf.shape for leaf in jax.tree.leaves(whole.layouts.shape)
        }
        went_on = then.layouts.unload(run(then, then.layouts.load(restored), 1))
        expected = first.layouts.unload(run(first, state, 1))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=EXACT), went_on, expected)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("theirs", "make"),
    [
        (optax.clip_by_global_norm(0.5), lambda total: clip_by_global_norm(0.5, total)),
        (optax.scale_by_trust_ratio(), lambda total: scale_by_trust_ratio(True, total)),
        (optax.scale_by_trust_ratio(trust_coefficient=0.1), lambda total: scale_by_lars(0.1, 0.0, True, total)),
    ],
    ids=["clip", "lamb", "lars"],
)
def test_optax_takes_the_norm_of_each_shard_alone(theirs: optax.GradientTransformation, make: Any) -> None:
    """Two shards of one kernel, each on a device: ours equals the update of the whole kernel, optax's does not."""
    gradients, params = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)
    gradients[:4] *= 5

    def on_shards(optimizer: optax.GradientTransformation) -> np.ndarray:
        update = jax.vmap(lambda *leaves: optimizer.update(leaves[0], optax.EmptyState(), leaves[1])[0], axis_name="x")
        return np.asarray(update(gradients.reshape(2, 4, 4), params.reshape(2, 4, 4))).reshape(8, 4)

    whole, _ = theirs.update(gradients, optax.EmptyState(), params)
    np.testing.assert_allclose(on_shards(make(lambda squares: jax.lax.psum(squares, "x"))), whole, rtol=1e-5)
    assert np.abs(on_shards(theirs) - whole).max() > 0.1 * np.abs(whole).max()


PARAMS = {"kernel": jax.ShapeDtypeStruct((300, 200), jnp.float32), "bias": jax.ShapeDtypeStruct((200,), jnp.float32)}


@pytest.mark.fast
@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(1.0, 0.9, nesterov=True), optax.adam(1.0), optax.adamw(1.0, mask={"kernel": True, "bias": False}),
     optax.clip(1.0), optax.rmsprop(1.0)],
)  # fmt: skip
def test_elementwise_optimizers_pass(optimizer: optax.GradientTransformation) -> None:
    check_elementwise(optimizer, PARAMS)


@pytest.mark.fast
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.clip_by_global_norm(1.0),
        optax.lars(1.0),
        optax.lamb(1.0),
        optax.adafactor(1.0),  # factored for large kernels alone
        optax.adamw(1.0, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
        optax.normalize_by_update_norm(),
        optax.clip_by_global_norm(1e9),
        optax.add_noise(0.1, 0.55, 0),
        optax.apply_if_finite(optax.sgd(1.0), 3),
        optax.contrib.prodigy(),
        optax.contrib.muon(1.0),
    ],
)
def test_others_are_refused(optimizer: optax.GradientTransformation) -> None:
    with pytest.raises(ValueError, match=r"reducer=zero1: .* use another reducer"):
        check_elementwise(optimizer, PARAMS)


def test_an_optimizer_of_ones_own() -> None:
    config, mesh = tiny_config(reducer="zero1"), make_mesh("0-1")
    own = make_program(config, mesh, dense_chain("sync"), optax.trace(0.9, nesterov=True))
    same = replace(config, optim=OptimConfig(weight_decay=0.0))
    configured = make_program(same, mesh, dense_chain("sync"))
    states = [made.layouts.unload(run(made, made.init(), 1)).params for made in (own, configured)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    with pytest.raises(ValueError, match="reducer=zero1"):
        make_program(config, mesh, dense_chain("sync"), optax.clip_by_global_norm(1.0))
