"""Recipes that change what the network sees or is to say."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import DATA, tiny_config

from trjax.config.run import DataConfig
from trjax.data.augment import make_augment
from trjax.data.batches import Batch, Inputs
from trjax.data.mixing import mix, swap_neighbours
from trjax.data.sources import describe
from trjax.keys import example_keys
from trjax.mesh import make_mesh
from trjax.step.program import make_program
from trjax.step.scores import score

SIZE, CLASSES = 64, 10


def smooth(labels: jax.Array) -> jax.Array:
    return optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), 0.1)


def batch_of(size: int, real: int | None = None) -> Batch:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (size, 8, 8, 3), dtype=np.uint8)
    mask = (np.arange(size) < (size if real is None else real)).astype(np.float32)
    return Batch(images, random.integers(0, CLASSES, size, dtype=np.int32), mask, np.arange(size, dtype=np.int32) + 7)


def mixed(real: int | None = None, **options: Any) -> tuple[Inputs, np.ndarray, Batch]:
    """Images that are 1 everywhere in even places and 0 in odd ones, mixed; with the targets before."""
    block = batch_of(SIZE, real)
    images = np.broadcast_to((np.arange(SIZE) % 2 == 0)[:, None, None, None], (SIZE, 8, 8, 3)).astype(np.float32)
    targets = np.asarray(smooth(jnp.asarray(block.labels)))
    keys = example_keys(jax.random.key(3), jnp.asarray(block.indices))
    made = mix(keys, jnp.asarray(images), jnp.asarray(targets), block, replace(DATA, **options))
    return jax.tree.map(np.asarray, made), targets, block


def kept_shares(made: Inputs) -> np.ndarray:
    """What an example kept of itself, by its pixels."""
    ones = made.images.mean((1, 2, 3))
    return np.where(np.arange(SIZE) % 2 == 0, ones, 1 - ones)


@pytest.mark.parametrize("options", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.2, "cutmix": 1.0}], ids=str)
def test_targets_follow_the_pixels_and_keep_their_mass(options: dict[str, Any]) -> None:
    made, before, _ = mixed(**options)
    shares = kept_shares(made)
    assert made.targets.sum(1) == pytest.approx(1, abs=1e-6)
    expected = shares[:, None] * before + (1 - shares[:, None]) * np.asarray(swap_neighbours(jnp.asarray(before)))
    np.testing.assert_allclose(made.targets, expected, atol=1e-6)
    assert len(np.unique(shares.round(5))) > 10  # an example by itself
    boxes = np.array([len(np.unique(image)) == 2 for image in made.images])
    if "mixup" not in options:
        assert set(np.unique(made.images)) <= {0.0, 1.0}
    elif "cutmix" not in options:
        assert not boxes.any()  # one value each
    else:
        assert 0.1 < boxes.mean() < 0.9


def test_the_neighbour_of_padding_stays_as_it_is() -> None:
    made, before, _ = mixed(real=5, mixup=1.0)
    assert kept_shares(made)[4] == 1
    np.testing.assert_array_equal(made.targets[4], before[4])
    assert kept_shares(made)[3] < 1


def test_cutmix_takes_areas_from_beta() -> None:
    """Beta(1, 1) is even in [0, 1]: boxes inside of the image have that area, those at the edge less."""
    shares = np.concatenate([kept_shares(mixed(cutmix=1.0)[0])])
    assert 0.5 < shares.mean() < 0.8
    assert shares.min() < 0.4
    assert shares.max() > 0.95


def test_mixing_is_the_same_on_any_device_in_any_batch() -> None:
    config = replace(DATA, mixup=0.3, cutmix=1.0, flip=True)
    augment = jax.jit(make_augment(config, describe(config), 0, 0.1))
    block = batch_of(16)
    whole = augment(block, jnp.int32(2))
    for start in range(0, 16, 4):
        part = augment(Batch(*(leaf[start : start + 4] for leaf in block)), jnp.int32(2))
        jax.tree.map(
            lambda a, b, start=start: np.testing.assert_allclose(a, b[start : start + 4], atol=1e-6), part, whole
        )
    other = augment(block, jnp.int32(3))
    assert np.abs(np.asarray(other.targets) - np.asarray(whole.targets)).max() > 0.1


def test_smoothed_cross_entropy_is_the_one_of_the_paper() -> None:
    """(1 - e) CE(label) + e mean over classes of CE(class)."""
    random = np.random.default_rng(0)
    logits, labels = jnp.asarray(random.normal(size=(6, CLASSES)).astype(np.float32)), jnp.arange(6)
    loss, results = score(logits, labels, jnp.ones(6), smooth(labels))
    own = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    even = -jax.nn.log_softmax(logits).mean(1)
    np.testing.assert_allclose(loss, (0.9 * own + 0.1 * even).sum(), rtol=1e-6)
    np.testing.assert_array_equal(results[1:], score(logits, labels, jnp.ones(6))[1][1:])


def test_odd_parts_cannot_be_mixed_in_pairs() -> None:
    config = tiny_config(data=replace(DATA, mixup=0.2))
    with pytest.raises(ValueError, match="data.mixup or data.cutmix with 3 examples a device: must be even"):
        make_program(config, make_mesh("0-7"))


@pytest.mark.parametrize("changes", [{"mixup": -1.0}, {"cutmix": 1e-9}, {"mixup": float("nan")}], ids=str)
def test_impossible_shares_are_refused(changes: Any) -> None:
    with pytest.raises(ValueError, match=r"data\.(mixup|cutmix)="):
        DataConfig(**changes)
