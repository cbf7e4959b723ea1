from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trjax.models.pooling import max_pool


def flax_pool(x: Any, stride: int) -> Any:
    return nn.max_pool(x, (3, 3), (stride, stride), ((1, 1), (1, 1)))


def test_worked_by_hand() -> None:
    """The 9 is in all four windows, and takes all of their gradients."""
    x = jnp.array([[1.0, 2, 3, 4], [5, 9, 7, 8], [4, 3, 2, 1], [0, 1, 2, 3]]).reshape(1, 4, 4, 1)
    y, pull = jax.vjp(lambda x: max_pool(x, 2), x)
    np.testing.assert_array_equal(y.reshape(2, 2), [[9, 9], [9, 9]])
    (dx,) = pull(jnp.array([1.0, 10, 100, 1000]).reshape(1, 2, 2, 1))
    expected = np.zeros((4, 4))
    expected[1, 1] = 1111
    np.testing.assert_array_equal(dx.reshape(4, 4), expected)


@pytest.mark.fast
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [(7, 8), (8, 7), (1, 2), (9, 9)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_flax_to_the_bit_ties_included(stride: int, size: tuple[int, int], dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-2, 3, (3, *size, 4)), dtype)
    theirs, pull_theirs = jax.vjp(lambda x: flax_pool(x, stride), x)
    mine, pull_mine = jax.vjp(lambda x: max_pool(x, stride), x)
    np.testing.assert_array_equal(mine, theirs)
    dy = jnp.asarray(rng.normal(size=mine.shape), dtype)
    np.testing.assert_array_equal(pull_mine(dy)[0], pull_theirs(dy)[0])


def test_what_is_not_a_number_is_seen() -> None:
    x = jnp.zeros((1, 4, 4, 1)).at[0, 1, 1, 0].set(jnp.nan)
    assert np.isnan(max_pool(x, 2)).all()
