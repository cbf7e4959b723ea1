"""A model is a chain: named flax modules, each applied to the result of the one before.

A module of a chain is called as `module(x, train=..., mask=..., keys=...)`, where `mask` is 1 for real examples and
0 for padding, and `keys` holds a random key for each example, for dropout and the like; it keeps its parameters in
`params` and running statistics in `batch_stats`. Nothing else is asked of it.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from trjax.keys import example_keys

Chain = Mapping[str, nn.Module]
"""Segments by name, in forward order."""


def apply_segment(
    module: nn.Module,
    params: Any,
    batch_stats: Any,
    x: jax.Array,
    *,
    train: bool,
    mask: jax.Array,
    keys: jax.Array,
) -> tuple[jax.Array, Any]:
    """Applies one segment to a block of examples.

    Args:
        module: the segment.
        params: its parameters.
        batch_stats: its running statistics, `{}` if it has none or they are folded away.
        x: input, leading dim = examples.
        train: normalise with the batch and update the statistics, or use the statistics.
        mask: float32, one per example: 0 keeps padding out of every statistic.
        keys: random keys, one per example, for dropout and the like.

    Returns:
        The output and the new running statistics.
    """
    variables = {"params": params, "batch_stats": batch_stats}
    mutable = ["batch_stats"] if train else []
    y, changed = module.apply(variables, x, train=train, mask=mask, keys=keys, mutable=mutable)
    return y, changed.get("batch_stats", batch_stats)


def apply_chain(
    chain: Chain,
    params: Any,
    x: jax.Array,
    *,
    batch_stats: Any,
    train: bool,
    mask: jax.Array,
    keys: Mapping[str, jax.Array],
) -> tuple[jax.Array, dict[str, Any]]:
    """Applies segments in a row to a block of examples; see `apply_segment`.

    Args:
        chain: the segments.
        params: `{segment: tree}`.
        x: input of the first segment, leading dim = examples.
        batch_stats: `{segment: tree}`; a segment whose statistics were folded away may be missing.
        train: as for each segment.
        mask: as for each segment.
        keys: of each segment, see `segment_keys`.

    Returns:
        The output of the last segment and the new running statistics, `{segment: tree}`.
    """
    new_stats = {}
    for name, module in chain.items():
        stats = batch_stats.get(name, {})
        x, new_stats[name] = apply_segment(module, params[name], stats, x, train=train, mask=mask, keys=keys[name])
    return x, new_stats


def segment_keys(chain: Iterable[str], key: jax.Array, indices: jax.Array) -> dict[str, jax.Array]:
    """Returns a random key for each segment and example; they depend on nothing else than these and `key`.

    Args:
        chain: all segments, in forward order.
        key: of the step.
        indices: of the examples, shape (examples,).
    """
    return {name: example_keys(jax.random.fold_in(key, index), indices) for index, name in enumerate(chain)}


def list_spans(segments: Iterable[str], remat: str) -> list[tuple[str, ...]]:
    """Returns the segments that have one pullback together: each alone, or those of a stage.

    Args:
        segments: names, in forward order.
        remat: see `step.spec.GradientPlan`.

    >>> list_spans(["stem", "stage1_block1", "stage1_block2", "head"], "stage")
    [('stem',), ('stage1_block1', 'stage1_block2'), ('head',)]
    """
    if remat != "stage":
        return [(segment,) for segment in segments]
    return [tuple(names) for _, names in groupby(segments, lambda segment: segment.rpartition("_")[0] or segment)]


def init_chain(chain: Chain, key: jax.Array, image_shape: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns fresh parameters and running statistics, `{segment: tree}` each.

    Segments are initialised with running statistics in use, so that no collective runs: a chain with
    synchronised BatchNorm initialises outside a mesh too.
    """
    params, batch_stats = {}, {}
    x, mask = jnp.zeros((1, *image_shape)), jnp.ones(1)
    for index, (name, module) in enumerate(chain.items()):
        own, drawing = jax.random.split(jax.random.fold_in(key, index))
        x, variables = module.init_with_output(own, x, train=False, mask=mask, keys=drawing[None])
        params[name], batch_stats[name] = variables.get("params", {}), variables.get("batch_stats", {})
    return params, batch_stats


def evaluate_chain(chain: Chain, params: Any, batch_stats: Any, x: jax.Array) -> jax.Array:
    """Returns the logits of a block of examples, with running (or folded) statistics.

    Args:
        chain: the model.
        params: `{segment: tree}`.
        batch_stats: `{segment: tree}`; a segment whose statistics were folded away may be missing.
        x: preprocessed images, shape (examples, height, width, channels).
    """
    # Evaluation leaves padding out of the sums, not out of the batch, and draws nothing.
    mask, keys = jnp.ones(x.shape[0]), dict.fromkeys(chain, jnp.broadcast_to(jax.random.key(0), x.shape[:1]))
    return apply_chain(chain, params, x, batch_stats=batch_stats, train=False, mask=mask, keys=keys)[0]
