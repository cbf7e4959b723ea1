"""Every example counts exactly once, whatever the batch and the world size."""

import re
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import spread, tiny_program

from trjax.data.augment import normalise
from trjax.data.batches import eval_batches
from trjax.data.sources import ArraySource, DataSpec
from trjax.models.chain import evaluate_chain
from trjax.step.evaluation import init_totals

BATCH = 24
SIZES = [1, BATCH - 1, BATCH, BATCH + 1, 5 * BATCH + 3]
SPEC = DataSpec((8, 8, 3), 10, 0, 0, (0.5,) * 3, (0.25,) * 3)


def make_source(num_examples: int) -> ArraySource:
    random = np.random.default_rng(num_examples)
    images = random.integers(0, 256, (num_examples, 8, 8, 3), dtype=np.uint8)
    return ArraySource(images, random.integers(0, 10, num_examples, dtype=np.int32))


@cache
def prepared(num_devices: int, global_batch: int = BATCH) -> tuple[Any, Any, Any]:
    program = tiny_program(num_devices, global_batch=global_batch)
    state = program.init()
    return program, spread(state.params), spread(state.batch_stats, 1)


def evaluate(num_devices: int, source: Any, batches_of: Any, global_batch: int = BATCH) -> np.ndarray:
    program, params, batch_stats = prepared(num_devices, global_batch)
    totals = init_totals(program.mesh)
    for batch in batches_of(source, global_batch):
        totals = program.accumulate(totals, params, batch_stats, program.place(batch))
    return np.asarray(program.reduce_totals(totals))


def expected(source: ArraySource) -> np.ndarray:
    """Loss sum and counts in numpy, with unfolded BatchNorm, all examples at once."""
    program, params, batch_stats = prepared(1)
    logits = np.asarray(
        evaluate_chain(program.gradients.chain, params, batch_stats, normalise(jnp.asarray(source.images), SPEC)),
        np.float64,
    )
    own = logits[np.arange(len(source)), source.labels]
    rank = (logits > own[:, None]).sum(1)
    losses = np.log(np.exp(logits).sum(1)) - own
    return np.array([losses.sum(), (rank < 1).sum(), (rank < 5).sum(), len(source)])


def check(num_devices: int, size: int, batches_of: Any = eval_batches) -> None:
    source = make_source(size)
    results = evaluate(num_devices, source, batches_of)
    np.testing.assert_array_equal(results[1:], expected(source)[1:])
    np.testing.assert_allclose(results[0], expected(source)[0], rtol=1e-5)


@pytest.mark.parametrize("num_devices", [1, 2, 8])
@pytest.mark.parametrize("size", SIZES)
def test_every_example_once(num_devices: int, size: int) -> None:
    check(num_devices, size)
    indices = np.concatenate([batch.indices[batch.mask > 0] for batch in eval_batches(make_source(size), BATCH)])
    assert indices.tolist() == list(range(size))


@pytest.mark.parametrize("global_batch", [2, 64])
def test_same_metrics_for_every_batch(global_batch: int) -> None:
    source = make_source(5 * BATCH + 3)
    results = evaluate(2, source, eval_batches, global_batch)
    np.testing.assert_array_equal(results[1:], evaluate(8, source, eval_batches)[1:])
    np.testing.assert_allclose(results[0], expected(source)[0], rtol=1e-5)


@pytest.mark.fast
def test_one_all_reduce_an_evaluation() -> None:
    program, params, batch_stats = prepared(8)
    lowered = program.accumulate.lower(program.totals_shape, params, batch_stats, program.batch_shape)
    assert "all_reduce" not in lowered.as_text()
    reduced = program.reduce_totals.lower(program.totals_shape)
    assert reduced.as_text().count("all_reduce") == 1
    assert len(re.findall(r" all-reduce(-start)?\(", reduced.compile().as_text())) == 1
    for size in (BATCH, BATCH + 1):
        evaluate(8, make_source(size), eval_batches)
    assert program.accumulate._cache_size() == program.reduce_totals._cache_size() == 1  # partial batches included


def drop_remainder(source: Any, size: int) -> Any:
    return [batch for batch in eval_batches(source, size) if batch.mask.all()]


def count_padding(source: Any, size: int) -> Any:
    return [batch._replace(mask=np.ones(size, np.float32)) for batch in eval_batches(source, size)]


def repeat_an_example(source: Any, size: int) -> Any:
    return [*eval_batches(source, size), *eval_batches(ArraySource(source.images[:1], source.labels[:1]), size)]


@pytest.mark.parametrize("fault", [drop_remainder, count_padding, repeat_an_example])
def test_planted_faults_are_caught(fault: Any) -> None:
    with pytest.raises(AssertionError):
        check(2, BATCH + 1, fault)
