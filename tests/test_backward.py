"""World-size invariance: the sum over the devices is the gradient of one device, whatever the number of devices."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    Dense,
    noise_block,
    one_block_chain,
    plain_gradients,
    reduced_on,
    relative_error,
    spread,
    worst_kind_error,
)

from trjax.config.run import Config, DataConfig
from trjax.data.batches import train_batches
from trjax.data.sources import load
from trjax.mesh import AXIS, make_mesh
from trjax.models.chain import Chain, evaluate_chain, init_chain
from trjax.models.resnet import Block, Head, StemSegment, make_resnet
from trjax.step import collectives
from trjax.step.buckets import at_launches
from trjax.step.options import INIT_OPTIONS
from trjax.step.program import make_program
from trjax.step.scores import score

EXACT = 1e-6
"""Relative error that float32 sums in another order may leave: some ten times the rounding of one number."""

EXACT_KIND = 5e-6
"""The same for the small kinds of leaf by themselves, where terms cancel: 2.5e-6 was the most seen."""

WORLD_SIZES = [1, 2, 3, 4, 8]
GLOBAL_BATCH = 24


def bottleneck_chain(reduce_moments: Any) -> Chain:
    shared: dict[str, Any] = {"reduce_moments": reduce_moments}
    return {
        "stem": StemSegment(8, "imagenet", **shared),
        "block1": Block(4, 1, bottleneck=True, projection=True, **shared),
        "block2": Block(8, 2, bottleneck=True, projection=True, **shared),
        "head": Head(10),
    }


CHAINS = {
    "resnet20": lambda reduce: make_resnet("resnet20", num_classes=10, width=8, reduce_moments=reduce),
    "bottleneck": bottleneck_chain,
    "one block": one_block_chain,
}


@cache
def start(name: str) -> tuple[Any, Any, Any]:
    """Parameters, statistics and a global batch; the statistics are not those of the batch.

    No activation of it is within rounding of 0, where a ReLU would pass one sum's gradient and not another's.
    """
    chain = CHAINS[name](None)
    size = 16 if name == "bottleneck" else 8
    init = jax.jit(lambda: init_chain(chain, jax.random.key(1), (size, size, 3)), compiler_options=INIT_OPTIONS["cpu"])
    params, batch_stats = jax.tree.map(np.asarray, init())
    return spread(params), spread(batch_stats, 1), noise_block(3, GLOBAL_BATCH, (size, size, 3))


@cache
def whole_batch(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return plain_gradients(CHAINS[name](None), *start(name))


def assert_equal_to_rounding(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert relative_error(actual, expected) < EXACT
    assert worst_kind_error(actual, expected) < EXACT_KIND


def check_sync(name: str, num_devices: int) -> None:
    """With statistics of the global batch, N devices equal one that has the whole batch."""
    chain = CHAINS[name](collectives.sum_moments)
    reduced = reduced_on(num_devices, chain, *start(name))
    gradients, stats = whole_batch(name)
    assert_equal_to_rounding(reduced, gradients)
    assert_equal_to_rounding(reduced, stats)
    assert reduced["results"][3] == GLOBAL_BATCH


def check_local(name: str, num_devices: int) -> None:
    """With statistics of each shard, N devices equal the mean over the shards, computed one by one."""
    chain, (params, batch_stats, block) = CHAINS[name](None), start(name)
    reduced = reduced_on(num_devices, chain, params, batch_stats, block)
    if name != "one block":  # a shard by mask: one program serves all sizes (the mask has tests of its own)
        owner = np.arange(GLOBAL_BATCH) * num_devices // GLOBAL_BATCH
        shards = [(*block[:2], np.float32(owner == device)) for device in range(num_devices)]
    else:
        shards = list(zip(*[np.split(leaf, num_devices) for leaf in block], strict=True))
    parts = [plain_gradients(chain, params, batch_stats, shard) for shard in shards]
    gradients, stats = weighted_mean(parts, [1.0] * num_devices)
    assert_equal_to_rounding(reduced, gradients)
    assert_equal_to_rounding(reduced, stats)
    assert reduced["results"][3] == GLOBAL_BATCH  # the only trace of a double sum: the count scales it away


def weighted_mean(parts: list[Any], weights: list[float]) -> Any:
    return jax.tree.map(lambda *leaves: np.average(leaves, 0, weights), *parts)


@pytest.mark.parametrize("num_devices", WORLD_SIZES)
@pytest.mark.parametrize("name", ["resnet20", "bottleneck"])
def test_sync_equals_one_device(name: str, num_devices: int) -> None:
    check_sync(name, num_devices)


@pytest.mark.parametrize("num_devices", WORLD_SIZES)
@pytest.mark.parametrize("name", ["resnet20", "bottleneck"])
def test_local_equals_the_mean_of_the_shards(name: str, num_devices: int) -> None:
    check_local(name, num_devices)


@pytest.mark.fast
def test_one_block_on_eight_devices() -> None:
    check_sync("one block", 8)
    check_local("one block", 8)


def test_any_number_of_groups_gives_the_same() -> None:
    chain, prepared = CHAINS["one block"](None), start("one block")
    two = reduced_on(4, chain, *prepared)
    results = two.pop("results")
    for launches in ((0,), (2, 1), (1,)):
        other = reduced_on(4, chain, *prepared, partial(at_launches, launches))
        np.testing.assert_allclose(other.pop("results"), results, rtol=EXACT)
        assert other.keys() == two.keys()
        assert_equal_to_rounding(other, two)


@pytest.mark.parametrize(("num_devices", "sync"), [(1, False), (8, False), (8, True)])
def test_masked_batch_equals_the_real_examples_alone(num_devices: int, sync: bool) -> None:
    """17 real examples of 24: on 8 devices, one shard is partly padding and two are nothing else."""
    real = 17
    params, batch_stats, (images, labels, _) = start("one block")
    mask = (np.arange(GLOBAL_BATCH) < real).astype(np.float32)
    padded = np.where(mask[:, None, None, None] > 0, images, 77.0).astype(np.float32), labels, mask
    chain, plain = CHAINS["one block"](collectives.sum_moments if sync else None), CHAINS["one block"](None)
    reduced = reduced_on(num_devices, chain, params, batch_stats, padded)
    shard_size = GLOBAL_BATCH if sync else GLOBAL_BATCH // num_devices
    alone = images[:real], labels[:real], mask[:real]
    shards = [tuple(leaf[at : at + shard_size] for leaf in alone) for at in range(0, real, shard_size)]
    parts = [plain_gradients(plain, params, batch_stats, shard) for shard in shards]
    gradients, stats = weighted_mean(parts, [float(len(shard[1])) for shard in shards])
    assert_equal_to_rounding(reduced, gradients)
    assert_equal_to_rounding(reduced, stats)
    assert reduced["results"][3] == real


@pytest.mark.parametrize("real", [24, 17, 2])
def test_statistics_of_the_first_device(real: int) -> None:
    """With `bn=rank0` they are those of its shard alone, while gradients are the mean over all shards."""
    params, batch_stats, (images, labels, _) = start("one block")
    mask = (np.arange(GLOBAL_BATCH) < real).astype(np.float32)
    chain, block = CHAINS["one block"](None), (images, labels, mask)
    reduced = reduced_on(4, chain, params, batch_stats, block, statistics="first")
    _, stats = plain_gradients(chain, params, batch_stats, [leaf[:6] for leaf in block])
    assert_equal_to_rounding(reduced, stats)
    averaged = reduced_on(4, chain, params, batch_stats, block)
    for name in averaged.keys() - stats.keys():
        np.testing.assert_allclose(reduced[name], averaged[name], rtol=EXACT, atol=EXACT)
    assert real < 7 or relative_error(averaged, stats) > 0.01


OWN_CHAIN = {"first": Dense(16), "middle": Dense(16), "last": Dense(10, relu=False)}


@pytest.mark.parametrize("num_devices", [1, 4])
def test_gradients_of_a_chain_of_ones_own(num_devices: int) -> None:
    params, batch_stats = init_chain(OWN_CHAIN, jax.random.key(0), (4, 4, 1))
    block = noise_block(3, 8, (4, 4, 1))
    reduced = reduced_on(num_devices, OWN_CHAIN, params, batch_stats, block)
    gradients, _ = plain_gradients(OWN_CHAIN, params, batch_stats, block)
    assert len(gradients) == 6
    assert_equal_to_rounding(reduced, gradients)


def test_a_chain_of_ones_own_trains_with_the_same_step() -> None:
    data = DataConfig(source="synthetic", image_shape=(4, 4, 1), train_examples=96)
    config = Config(global_batch=48, data=data)
    curves = []
    for num_devices in (1, 4):
        program, losses = make_program(config, make_mesh(f"0-{num_devices - 1}"), OWN_CHAIN), []
        state = program.init()
        for batch in train_batches(load(data)[0], 48, 0, 0, 20):
            placed = program.place_train(batch)
            state, results = program.train_step(state, placed, np.full(1, 0.1, np.float32), program.votes(False))
            losses.append(float(results[0] / results[3]))
        curves.append(losses)
    assert curves[0][-1] < curves[0][0] - 0.3
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-4)  # rounding, amplified by 20 steps


def test_synchronised_chain_initialises_and_evaluates_outside_a_mesh() -> None:
    chain, plain = one_block_chain(collectives.sum_moments), one_block_chain()
    params, batch_stats = init_chain(chain, jax.random.key(0), (8, 8, 3))
    images = jnp.asarray(noise_block(4, 2)[0])
    logits = evaluate_chain(chain, params, batch_stats, images)
    np.testing.assert_array_equal(logits, evaluate_chain(plain, params, batch_stats, images))


def test_score_by_hand() -> None:
    logits = jnp.array(
        [[2.0, 1, 0, 0, 0, 0, 0], [2.0, 1, 0, 0, 0, 0, 0], [0.0, 0, 0, 0, 0, 0, 9], [9.0, 0, 0, 0, 0, 0, 0]]
    )
    labels, mask = jnp.array([0, 1, 5, 1]), jnp.array([1.0, 1, 1, 0])
    loss, results = score(logits, labels, mask)
    normaliser = np.log(np.exp(2) + np.exp(1) + 5)
    expected = (normaliser - 2) + (normaliser - 1) + np.log(np.exp(9) + 6)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    # third: logit 6 beats it and classes 0-4, equal to it, come first: rank 6
    np.testing.assert_allclose(results, [expected, 1, 2, 3], rtol=1e-6)


def test_a_network_that_broke_scores_nothing() -> None:
    loss, results = score(jnp.full((2, 10), jnp.nan), jnp.array([0, 9]), jnp.ones(2))
    assert np.isnan(loss)
    np.testing.assert_array_equal(results[1:], [0, 0, 2])


def one_devices_statistics(buffer: jax.Array, after: jax.Array | None) -> jax.Array:
    if after is None:
        return jax.lax.psum(buffer, AXIS)
    size = 2 * (4 + 8 + 8 + 8)  # means and variances at the end of `first`
    mine = jnp.where(jax.lax.axis_index(AXIS) == 0, buffer[-size:] * jax.lax.axis_size(AXIS), 0)
    return jax.lax.psum(jnp.concatenate([buffer[:-size], mine]), AXIS)


def double_sum(buffer: jax.Array, after: jax.Array | None) -> jax.Array:
    return jax.lax.psum(jax.lax.pcast(jax.lax.psum(buffer, AXIS), AXIS, to="varying"), AXIS)


def swapped_regions(buffer: jax.Array, after: jax.Array | None) -> jax.Array:
    """Two regions of `deep`, the 3x3 kernels of 4x8 and 8x8 channels, in the wrong order."""
    kernels, rest = buffer[: 9 * 8 * 12], buffer[9 * 8 * 12 :]
    swapped = jnp.concatenate([kernels[9 * 8 * 8 :], kernels[: 9 * 8 * 8], rest])
    return jax.lax.psum(swapped if after is None else buffer, AXIS)


FAULTS = {
    "double sum": ("all_reduce", double_sum),
    "swapped regions": ("all_reduce", swapped_regions),
    "statistics of one device": ("all_reduce", one_devices_statistics),
    "no sum of the end": ("all_reduce", lambda buffer, after: jax.lax.psum(buffer.at[-1].set(0), AXIS)),
    "no cast": ("vary", lambda tree: tree),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, replacement = FAULTS[fault]
    monkeypatch.setattr(collectives, name, replacement)
    with pytest.raises(ValueError if fault == "no cast" else AssertionError):
        check_local("one block", 4)
