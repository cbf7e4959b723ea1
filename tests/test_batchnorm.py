from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import noise_block, spread, tiny_program

from trjax.models.batchnorm import EPSILON, BatchNorm, fold_batchnorm
from trjax.models.chain import evaluate_chain

ROUNDING = 1e-5


def normalise(x: Any, mask: Any, stats: Any = None, **options: Any) -> tuple[jax.Array, Any]:
    channels = x.shape[-1]
    params = {"scale": jnp.arange(1.0, channels + 1), "bias": jnp.full(channels, 0.5)}
    stats = stats or {"running_mean": jnp.full(channels, 0.25), "running_var": jnp.full(channels, 2.0)}
    module = BatchNorm(**options)
    y, new = module.apply(
        {"params": params, "batch_stats": stats},
        jnp.asarray(x),
        train=True,
        mask=jnp.asarray(mask),
        mutable=["batch_stats"],
    )
    return y, new["batch_stats"]


def test_worked_by_hand() -> None:
    x = np.array([1.0, 3.0, 5.0], np.float32).reshape(3, 1, 1, 1)  # mean 3, variance 8/3, unbiased 4
    y, stats = normalise(x, np.ones(3, np.float32))
    expected = (x - 3) / np.sqrt(8 / 3 + EPSILON) + 0.5
    np.testing.assert_allclose(y, expected, rtol=ROUNDING)
    np.testing.assert_allclose(stats["running_mean"], [0.9 * 0.25 + 0.1 * 3], rtol=ROUNDING)
    np.testing.assert_allclose(stats["running_var"], [0.9 * 2 + 0.1 * 4], rtol=ROUNDING)


def test_equals_flax() -> None:
    x = noise_block(0, 6)[0]
    y, _ = normalise(x, np.ones(6, np.float32))
    params = {"scale": jnp.arange(1.0, 4), "bias": jnp.full(3, 0.5)}
    stats = {"mean": jnp.zeros(3), "var": jnp.ones(3)}
    theirs, _ = nn.BatchNorm(use_running_average=False, epsilon=EPSILON).apply(
        {"params": params, "batch_stats": stats}, jnp.asarray(x), mutable=["batch_stats"]
    )
    np.testing.assert_allclose(y, theirs, atol=ROUNDING)


def test_gradients_equal_those_that_jax_derives() -> None:
    """The gradient is written out; here it is derived from the definition, padding and its cotangent included."""
    x, cotangent = noise_block(4, 8)[0], jnp.asarray(noise_block(5, 8)[0])
    mask = np.array([1, 1, 0, 1, 1, 1, 0, 1], np.float32)

    def ours(x: Any, scale: Any, bias: Any) -> jax.Array:
        stats = {"running_mean": jnp.full(3, 0.25), "running_var": jnp.full(3, 2.0)}
        variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": stats}
        y, _ = BatchNorm().apply(variables, x, train=True, mask=jnp.asarray(mask), mutable=["batch_stats"])
        return (y * cotangent).sum()

    def defined(x: Any, scale: Any, bias: Any) -> jax.Array:
        real = x[np.flatnonzero(mask)]
        normal = (x - real.mean((0, 1, 2), keepdims=True)) / jnp.sqrt(real.var((0, 1, 2), keepdims=True) + EPSILON)
        return ((normal * scale.reshape(1, 1, 1, 3) + bias.reshape(1, 1, 1, 3)) * cotangent).sum()

    arguments = jnp.asarray(x), jnp.array([0.5, 1.0, 2.0]), jnp.array([0.1, 0.2, 0.3])
    for mine, theirs in zip(*(jax.grad(f, (0, 1, 2))(*arguments) for f in (ours, defined)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_rectified_one_is_followed_by_relu_gradients_and_ties_included() -> None:
    x, cotangent = noise_block(4, 8)[0], jnp.asarray(noise_block(5, 8)[0])
    x[..., 1] = 3.0  # a channel of one value: with bias 0 it becomes 0, where ReLU has no slope
    mask = np.array([1, 1, 0, 1, 1, 1, 0, 1], np.float32)
    cotangent *= mask.reshape(-1, 1, 1, 1)

    def loss(rectified: bool, x: Any, scale: Any, bias: Any) -> jax.Array:
        variables = {
            "params": {"scale": scale, "bias": bias},
            "batch_stats": {"running_mean": jnp.full(3, 3.0), "running_var": jnp.full(3, 2.0)},
        }
        y, _ = BatchNorm().apply(
            variables, x, train=True, mask=jnp.asarray(mask), rectified=rectified, mutable=["batch_stats"]
        )
        return ((y if rectified else nn.relu(y)) * cotangent).sum()

    arguments = jnp.asarray(x), jnp.array([0.5, 1.0, -2.0]), jnp.array([0.1, 0.0, 0.3])
    for mine, theirs in zip(
        *(jax.grad(partial(loss, one), (0, 1, 2))(*arguments) for one in (True, False)), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    assert loss(True, *arguments) == loss(False, *arguments)


def test_a_kernel_is_for_training_alone() -> None:
    x = jnp.ones((2, 3, 3, 4))
    with pytest.raises(ValueError, match="kernel: in training alone"):
        BatchNorm().init(jax.random.key(0), x, train=False, mask=jnp.ones(2), kernel=jnp.ones((4, 8)))


@pytest.mark.parametrize("real", [1, 2, 5])
def test_padding_does_not_count(real: int) -> None:
    x = noise_block(1, 8)[0]
    mask = np.arange(8) < real
    x[real:] = 1e3
    y, stats = normalise(x, mask.astype(np.float32))
    alone, alone_stats = normalise(x[:real], np.ones(real, np.float32))
    np.testing.assert_allclose(y[:real], alone, atol=ROUNDING)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=ROUNDING), stats, alone_stats)


def test_all_padding_keeps_the_statistics_and_stays_finite() -> None:
    x = noise_block(2, 4)[0]
    old = {"running_mean": jnp.array([1.0, 2, 3]), "running_var": jnp.array([0.5, 1, 2])}
    y, stats = normalise(x, np.zeros(4, np.float32), old)
    jax.tree.map(np.testing.assert_array_equal, stats, old)
    assert np.isfinite(y).all()
    loss = lambda x: normalise(x, np.zeros(4, np.float32), old)[0].sum()  # noqa: E731
    assert np.isfinite(jax.grad(loss)(jnp.asarray(x))).all()


def test_variance_survives_a_large_mean_that_the_running_mean_knows() -> None:
    x = noise_block(3, 64)[0] + 3000
    old = {"running_mean": jnp.full(3, 2999.0), "running_var": jnp.ones(3)}
    y, _ = normalise(x, np.ones(64, np.float32), old)
    exact = (x - x.mean((0, 1, 2), np.float64)) / np.sqrt(x.var((0, 1, 2), np.float64) + EPSILON)
    np.testing.assert_allclose(y, exact * np.arange(1, 4) + 0.5, atol=1e-3)  # x itself is rounded to 2e-4


def test_bfloat16_is_normalised_in_float32() -> None:
    x = noise_block(4, 16)[0].astype(jnp.bfloat16)
    y, stats = normalise(x, np.ones(16, np.float32))
    reference, _ = normalise(x.astype(np.float32), np.ones(16, np.float32))
    assert y.dtype == jnp.bfloat16
    assert stats["running_var"].dtype == jnp.float32
    np.testing.assert_array_equal(y, reference.astype(jnp.bfloat16))


def test_folding_by_hand() -> None:
    params = {"a": {"scale": jnp.array([2.0]), "bias": jnp.array([1.0])}, "fc": {"kernel": jnp.ones((1, 1))}}
    stats = {"a": {"running_mean": jnp.array([3.0]), "running_var": jnp.array([4.0 - EPSILON])}, "other": {"sigma": 1}}
    folded, rest = fold_batchnorm(params, stats)
    np.testing.assert_allclose(folded["a"]["scale"], [1.0], rtol=1e-6)
    np.testing.assert_allclose(folded["a"]["bias"], [-2.0], rtol=1e-6)
    assert folded["fc"] is params["fc"]
    assert rest == {"other": {"sigma": 1}}


@pytest.mark.fast
def test_folded_network_equals_unfolded() -> None:
    program = tiny_program(1)
    state = program.init()
    params, stats = spread(state.params), spread(state.batch_stats, 1)
    evaluate = jax.jit(partial(evaluate_chain, program.gradients.chain))
    images = noise_block(5, 16)[0]
    folded, rest = fold_batchnorm(params, stats)
    assert rest == {}
    plain = np.asarray(evaluate(params, stats, images))
    np.testing.assert_allclose(evaluate(folded, rest, images), plain, atol=ROUNDING * np.abs(plain).max())
