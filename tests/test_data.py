from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from trjax.config.run import DataConfig
from trjax.data.augment import make_augment
from trjax.data.batches import Batch, count_batches, epoch_order, eval_batches, train_batches
from trjax.data.sources import ArraySource, describe, load
from trjax.keys import Stream, stream_key
from trjax.mesh import SPLIT, make_mesh, placement

pytestmark = pytest.mark.fast


def numbered(num_examples: int) -> ArraySource:
    """Image i is filled with i, label i."""
    labels = np.arange(num_examples, dtype=np.int32)
    return ArraySource(np.broadcast_to(labels[:, None, None, None], (num_examples, 2, 2, 1)).astype(np.uint8), labels)


def test_digits_split() -> None:
    train, test = load(DataConfig())
    spec = describe(DataConfig())
    assert (len(train), len(test)) == (spec.train_examples, spec.test_examples) == (1437, 360)
    images, labels = train.read(np.arange(1437))
    assert images.shape[1:] == spec.image_shape
    assert images.dtype == np.uint8
    test_images, test_labels = test.read(np.arange(360))
    # stratified: every class in proportion; disjoint but for digits that are equal to the pixel
    assert np.abs(np.bincount(labels) / 1437 - np.bincount(test_labels) / 360).max() < 0.005
    assert len({image.tobytes() for image in [*images, *test_images]}) >= 1790
    pixels = images / 255
    assert (pixels.mean(), pixels.std()) == pytest.approx((spec.mean[0], spec.std[0]), abs=2e-4)
    again, _ = load(DataConfig())[0].read(np.arange(1437))
    np.testing.assert_array_equal(images, again)


def test_digits_are_those_of_scikit_learn() -> None:
    """In the order of its split: the file beside the code is nothing but a faster way to them."""
    digits = load_digits()
    parts = train_test_split(np.arange(1797), test_size=360, stratify=digits.target, random_state=0)
    for source, part in zip(load(DataConfig()), parts, strict=True):
        images, labels = source.read(np.arange(len(source)))
        np.testing.assert_array_equal(images[..., 0], np.rint(digits.images[part] * (255 / 16)))
        np.testing.assert_array_equal(labels, digits.target[part])


def test_synthetic_is_any_shape_and_repeatable() -> None:
    data = DataConfig(source="synthetic", image_shape=(5, 7, 2), num_classes=3, train_examples=11, test_examples=4)
    (train, test), (again, _) = load(data), load(data)
    images, labels = train.read(np.arange(11))
    assert images.shape == (11, 5, 7, 2)
    assert set(labels) <= {0, 1, 2}
    assert len(test) == 4
    np.testing.assert_array_equal(images, again.read(np.arange(11))[0])
    assert not np.array_equal(images[:4], test.read(np.arange(4))[0])


@given(st.integers(0, 2**32 - 1), st.integers(0, 1000), st.integers(0, 300))
def test_order_is_a_permutation(seed: int, epoch: int, num_examples: int) -> None:
    assert sorted(epoch_order(seed, epoch, num_examples)) == list(range(num_examples))


def test_order_depends_on_seed_and_epoch_alone() -> None:
    orders = [tuple(epoch_order(seed, epoch, 50)) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 6
    assert tuple(epoch_order(1, 2, 50)) == orders[-1]
    assert epoch_order(0, 0, 6).tolist() == [0, 5, 1, 2, 4, 3]  # the same tomorrow


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 5))
def test_every_epoch_holds_every_example_once(num_examples: int, global_batch: int, seed: int) -> None:
    per_epoch = count_batches(num_examples, global_batch)
    batches = list(train_batches(numbered(num_examples), global_batch, seed, 0, 2 * per_epoch))
    assert len(batches) == 2 * per_epoch
    for epoch in (batches[:per_epoch], batches[per_epoch:]):
        labels = np.concatenate([batch.labels[batch.mask > 0] for batch in epoch])
        assert sorted(labels) == list(range(num_examples))
        for batch in epoch:
            assert len(batch.labels) == len(batch.images) == len(batch.indices) == global_batch
            np.testing.assert_array_equal(batch.labels, batch.indices)
            np.testing.assert_array_equal(batch.images[:, 0, 0, 0], batch.labels)


def test_starting_in_the_middle_resumes_where_it_was() -> None:
    whole = list(train_batches(numbered(25), 8, 3, 0, 10))
    for start in range(10):
        rest = list(train_batches(numbered(25), 8, 3, start, 10))
        np.testing.assert_equal(rest, whole[start:])


def test_a_set_smaller_than_a_batch_is_padded() -> None:
    (batch,) = eval_batches(numbered(3), 8)
    assert batch.mask.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert list(eval_batches(numbered(0), 8)) == []


AUGMENTED = DataConfig(source="cifar10", crop_padding=4, flip=True)


def augmented(batch: Batch, epoch: int, seed: int = 0, data: DataConfig = AUGMENTED) -> np.ndarray:
    return np.asarray(jax.jit(make_augment(data, describe(data), seed))(batch, jnp.int32(epoch)).images)


def random_batch(size: int) -> Batch:
    random = np.random.default_rng(0)
    images = random.integers(1, 256, (size, 32, 32, 3), dtype=np.uint8)
    return Batch(images, np.zeros(size, np.int32), np.ones(size, np.float32), np.arange(size, dtype=np.int32) + 100)


def test_augmentation_depends_on_the_example_not_on_its_place() -> None:
    batch = random_batch(16)
    plain = augmented(batch, 3)
    shuffle = np.random.default_rng(1).permutation(16)
    moved = Batch(*(leaf[shuffle] for leaf in batch))
    np.testing.assert_array_equal(augmented(moved, 3), plain[shuffle])
    np.testing.assert_array_equal(augmented(Batch(*(leaf[5:8] for leaf in batch)), 3), plain[5:8])
    split = jax.device_put(batch, placement(make_mesh("0-7"), SPLIT))
    np.testing.assert_array_equal(augmented(split, 3), plain)
    assert not np.array_equal(augmented(batch, 4), plain)
    assert not np.array_equal(augmented(batch, 3, seed=1), plain)


def test_augmentation_crops_flips_and_normalises() -> None:
    batch = random_batch(64)
    spec = describe(AUGMENTED)
    images = augmented(batch, 0) * np.array(spec.std) + np.array(spec.mean)
    seen: set[Any] = set()
    for image, original in zip(images, batch.images, strict=True):
        padded = np.pad(original, ((4, 4), (4, 4), (0, 0))) / 255
        matches = [
            (row, column, flip)
            for row in range(9)
            for column in range(9)
            for flip in (False, True)
            if np.allclose(image[:, ::-1] if flip else image, padded[row : row + 32, column : column + 32], atol=1e-5)
        ]
        assert len(matches) == 1
        seen.add(matches[0])
    assert {flip for *_, flip in seen} == {False, True}
    assert {row for row, *_ in seen} == {column for _, column, _ in seen} == set(range(9))


def test_streams_of_random_keys_differ() -> None:
    keys = [stream_key(7, stream) for stream in get_args(Stream)]
    drawn = [tuple(jax.random.key_data(jax.random.fold_in(key, index)).tolist()) for key in keys for index in range(50)]
    assert len(set(drawn)) == len(drawn)


def test_a_short_last_batch_is_left_out_if_asked() -> None:
    batches = list(train_batches(numbered(25), 8, 3, 0, 6, "drop"))
    assert [int(batch.mask.sum()) for batch in batches] == [8] * 6
    epochs = [np.concatenate([batch.indices for batch in batches[at : at + 3]]) for at in (0, 3)]
    assert all(len(set(epoch)) == 24 for epoch in epochs)
    assert set(epochs[0]) != set(epochs[1])  # another example is left out
    (resumed,) = train_batches(numbered(25), 8, 3, 4, 5, "drop")
    np.testing.assert_array_equal(resumed.indices, batches[4].indices)
    with pytest.raises(ValueError, match=r"last_batch=drop with global_batch=32: 25 examples do not fill one batch"):
        count_batches(25, 32, "drop")
