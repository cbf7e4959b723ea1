"""Normalising what a 1x1 convolution would give, without it: against the convolution and `BatchNorm` themselves."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from trjax.mesh import AXIS, make_mesh
from trjax.models.batchnorm import BatchNorm
from trjax.models.moments import EPSILON, NormInputs, convolve_and_normalise, normalise, saves_traffic
from trjax.models.resnet import ConvNorm
from trjax.step.collectives import sum_moments

ROUNDING = 2e-5
CHANNELS, FEATURES = 5, 8


def arrays(seed: int, *shapes: tuple[int, ...]) -> list[jax.Array]:
    return [jnp.asarray(np.random.default_rng([seed, i]).normal(size=s), jnp.float32) for i, s in enumerate(shapes)]


def ways() -> tuple[Any, Any]:
    """Returns the function and what it must equal: (reduce, x, kernel, scale, bias, mask, mean, var) -> (y, ...)."""

    def plain(reduce: Any, x: Any, kernel: Any, scale: Any, bias: Any, mask: Any, mean: Any, var: Any) -> Any:
        z = lax.dot_general(x, kernel.astype(x.dtype), (((3,), (0,)), ((), ())))
        variables = {
            "params": {"scale": scale, "bias": bias},
            "batch_stats": {"running_mean": mean, "running_var": var},
        }
        module = BatchNorm(momentum=0.0, reduce_moments=reduce)
        y, new = module.apply(variables, z, train=True, mask=mask, mutable=["batch_stats"])
        return y, new["batch_stats"]["running_mean"], new["batch_stats"]["running_var"]

    return lambda reduce, *values: convolve_and_normalise(reduce, None, *values[:4], NormInputs(*values[4:])), plain


def layer(seed: int, examples: int, mask: Any = None) -> list[jax.Array]:
    x, kernel, scale, bias, mean = arrays(
        seed, (examples, 3, 4, CHANNELS), (CHANNELS, FEATURES), (FEATURES,), (FEATURES,), (FEATURES,)
    )
    mask = jnp.ones(examples) if mask is None else jnp.asarray(mask, jnp.float32)
    return [jnp.maximum(x + 0.5, 0), kernel, scale + 1, bias, mask, mean, jnp.full(FEATURES, 2.0)]


def test_worked_by_hand() -> None:
    """Pixels 1, 2 and 3 times 2: mean 4, variance 8/3, unbiased 4."""
    x = jnp.array([1.0, 2, 3]).reshape(3, 1, 1, 1)
    one = jnp.ones(1)
    y, mean, unbiased = convolve_and_normalise(
        None, None, x, jnp.full((1, 1), 2.0), one, 0 * one, NormInputs(jnp.ones(3), 0 * one, one)
    )
    np.testing.assert_allclose(y.ravel(), np.array([-2, 0, 2]) / np.sqrt(8 / 3 + EPSILON), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose([mean[0], unbiased[0]], [4, 4], rtol=1e-6)


@pytest.mark.fast
@pytest.mark.parametrize("mask", [[1] * 6, [1, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 1]])
def test_values_and_statistics_are_those_of_the_convolution(mask: list[int]) -> None:
    ours, plain = ways()
    values = layer(0, 6, mask)
    real = np.flatnonzero(mask)
    for mine, theirs in zip(ours(None, *values), plain(None, *values), strict=True):
        mine, theirs = (leaf[real] if leaf.ndim > 1 else leaf for leaf in (mine, theirs))
        np.testing.assert_allclose(mine, theirs, rtol=ROUNDING, atol=ROUNDING)


def test_values_that_lie_off_their_deviation() -> None:
    """Mean 30 deviations away: the variance keeps three digits, as the docstring says."""
    ours, plain = ways()
    x, *rest = layer(9, 64)
    x = 30 + arrays(9, x.shape)[0]
    for mine, theirs in zip(ours(None, x, *rest), plain(None, x, *rest), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=5e-3, atol=5e-3)


def test_bfloat16_is_centred_whatever_rounding_makes_of_the_kernel() -> None:
    ours, plain = ways()
    x, kernel, scale, bias, *rest = layer(10, 256)
    x = (1 + arrays(10, x.shape)[0]).astype(jnp.bfloat16)
    exact, _, _ = plain(None, x.astype(jnp.float32), kernel, scale, 0 * bias, *rest)
    mine, theirs = (np.float32(way(None, x, kernel, scale, 0 * bias, *rest)[0]) for way in (ours, plain))
    assert np.abs(mine.mean((0, 1, 2))).max() < 0.01
    assert np.abs(mine - exact).mean() < 1.5 * np.abs(theirs - exact).mean()  # no worse than a rounded convolution


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_convolution_of_the_model_is_the_plain_one(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, cotangent = arrays(11, (4, 7, 9, 4), (4, -(-7 // stride), -(-9 // stride), 12))
    module, mask = ConvNorm(12, 1, stride, rectified=True), jnp.array([1.0, 1, 0, 1])
    variables = module.init(jax.random.key(0), x, train=True, mask=mask)

    def differentiate() -> tuple[Any, bool]:
        """Returns values and gradients, and whether there are products of channels."""

        def loss(params: Any, x: Any) -> jax.Array:
            y, _ = module.apply({**variables, "params": params}, x, train=True, mask=mask, mutable=["batch_stats"])
            return (y * cotangent * mask.reshape(-1, 1, 1, 1)).sum()

        products = "dot_general" in str(jax.make_jaxpr(loss)(variables["params"], x))
        return jax.value_and_grad(loss, (0, 1))(variables["params"], x), products

    expanded, products = differentiate()
    assert products
    monkeypatch.setattr("trjax.models.resnet.saves_traffic", lambda *_: False)
    plain, products = differentiate()
    assert not products
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), expanded, plain)


def test_all_padding_keeps_the_statistics_and_stays_finite() -> None:
    ours, _ = ways()
    values = layer(1, 4, [0, 0, 0, 0])
    y, mean, var = ours(None, *values)
    np.testing.assert_array_equal(mean, values[5])
    np.testing.assert_array_equal(var, values[6])
    gradients = jax.grad(lambda *own: ours(None, *own, *values[4:])[0].sum(), (0, 1, 2, 3))(*values[:4])
    assert all(np.isfinite(leaf).all() for leaf in (y, *gradients))


@pytest.mark.fast
@pytest.mark.parametrize("mask", [[1] * 6, [1, 1, 0, 1, 0, 1]])
def test_gradients_are_those_of_the_convolution(mask: list[int]) -> None:
    values = layer(2, 6, mask)
    (cotangent,) = arrays(3, (6, 3, 4, FEATURES))
    cotangent *= values[4].reshape(-1, 1, 1, 1)  # padding's result is anything, and asked by nobody

    def gradients(way: Any) -> Any:
        loss = lambda *own: (way(None, *own, *values[4:])[0] * cotangent).sum()  # noqa: E731
        return jax.grad(loss, (0, 1, 2, 3))(*values[:4])

    for mine, theirs in zip(*map(gradients, ways()), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=ROUNDING, atol=ROUNDING * np.abs(theirs).max())


def test_gradients_are_slopes() -> None:
    values = layer(4, 4, [1, 0, 1, 1])
    (cotangent,) = arrays(5, (4, 3, 4, FEATURES))

    def loss(*own: Any) -> jax.Array:
        return (convolve_and_normalise(None, None, *own, NormInputs(*values[4:]))[0] * cotangent).sum()

    ahead, step = arrays(6, *(leaf.shape for leaf in values[:4])), 1e-2
    there, back = (
        loss(*(leaf + sign * step * way for leaf, way in zip(values[:4], ahead, strict=True))) for sign in (1, -1)
    )
    slopes = jax.grad(loss, (0, 1, 2, 3))(*values[:4])
    along = sum((slope * way).sum() for slope, way in zip(slopes, ahead, strict=True))
    np.testing.assert_allclose(along, (there - back) / (2 * step), rtol=1e-2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_shared_moments_are_those_of_the_whole_batch(world_size: int) -> None:
    ours, _ = ways()
    examples = 2 * world_size
    x, kernel, scale, bias, mask, mean, var = layer(
        7, examples, [1, *[1] * (examples - 3), 0, 0]
    )  # one device has none
    (cotangent,) = arrays(8, (examples, 3, 4, FEATURES))
    cotangent *= mask.reshape(-1, 1, 1, 1)
    split, whole = PartitionSpec(AXIS), PartitionSpec()

    def both(reduce: Any, x: Any, kernel: Any, mask: Any, cotangent: Any) -> Any:
        y, pull = jax.vjp(lambda x, *own: ours(reduce, x, *own, mask, mean, var)[0], x, kernel, scale, bias)
        dx, *others = pull(cotangent)
        return y, dx, others if reduce is None else lax.psum(others, AXIS)

    shared = jax.shard_map(
        partial(both, sum_moments), mesh=make_mesh(f"0-{world_size - 1}"),
        in_specs=(split, whole, split, split), out_specs=(split, split, whole), check_vma=False,
    )  # fmt: skip
    leaves = map(jax.tree.leaves, (shared(x, kernel, mask, cotangent), both(None, x, kernel, mask, cotangent)))
    for mine, theirs in zip(*leaves, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=ROUNDING, atol=ROUNDING * np.abs(theirs).max())


def test_where_it_pays() -> None:
    assert saves_traffic((256, 56, 56, 64), 256)
    assert saves_traffic((256, 7, 7, 1024), 2048)
    assert not saves_traffic((256, 56, 56, 256), 64)  # fewer features
    assert not saves_traffic((2, 2, 2, 64), 256)  # 8 pixels for 64 channels


@pytest.mark.parametrize("shape", [(6, 5), (6, 7, 7, 3), (6, 11, 11, 3), (6, 4, 4, 3), (6, 3, 5, 2), (6, 1, 1, 4)])
def test_sums_over_any_number_of_pixels(shape: tuple[int, ...]) -> None:
    """Runs of eight, of seven, of none: mean and unbiased variance are numpy's, in float64."""
    (x,), channels = arrays(7, shape), shape[-1]
    given = NormInputs(jnp.ones(6), jnp.full(channels, 0.3), jnp.ones(channels))
    _, mean, var = jax.jit(partial(normalise, None, False))(x, jnp.ones(channels), jnp.zeros(channels), given)
    values = np.asarray(x, np.float64).reshape(-1, channels)
    np.testing.assert_allclose(mean, values.mean(0), atol=1e-6)
    np.testing.assert_allclose(var, values.var(0, ddof=1), rtol=1e-5)
