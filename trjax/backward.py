"""The staged backward: one pullback per segment, run in reverse, each group summed when it is complete."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from trjax import collectives
from trjax.chain import Chain, apply_segment
from trjax.plan import Plan, flatten, name_leaves, unflatten


def score(logits: jax.Array, labels: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scores a block of examples.

    Args:
        logits: float32, shape (examples, classes).
        labels: int32, shape (examples,).
        mask: float32, shape (examples,): examples with 0 count for nothing.

    Returns:
        Cross-entropy summed over the examples, and `R_RESULT`: float32 (loss sum, top-1 count, top-5 count,
        example count). Equal logits rank in class order; one that is not a number counts against the example.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    loss = jnp.where(mask > 0, losses * mask, 0).sum()
    own = jnp.take_along_axis(logits, labels[:, None], 1)
    classes = jnp.arange(logits.shape[1])[None]
    before = classes < labels[:, None]
    beaten = jnp.where(before, logits < own, logits <= own) | (classes == labels[:, None])
    rank = (~beaten).sum(1)
    counts = [(mask * (rank < 1)).sum(), (mask * (rank < 5)).sum(), mask.sum()]
    return loss, jax.lax.stop_gradient(jnp.stack([loss, *counts]))


def _forward(
    module: nn.Module, batch_stats: Any, params: Any, x: jax.Array, *, mask: jax.Array, key: jax.Array
) -> tuple[jax.Array, Any]:
    return apply_segment(module, params, batch_stats, x, train=True, mask=mask, key=key)


def reduce_gradients(
    chain: Chain,
    plan: Plan,
    params: Any,
    batch_stats: Any,
    images: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    *,
    global_batch: int,
    key: jax.Array,
) -> dict[str, jax.Array]:
    """Runs forward and backward on this device's block and sums every group over the devices.

    The loss is divided by `global_batch` before the backward, so that the sum over the devices is the mean
    over the global batch, without a scale kernel. A device's BatchNorm statistics count by its share of the
    examples. Where padding leaves fewer than `global_batch` examples, a factor `global_batch / count`, with the
    count from the results, makes it the mean of the real ones; it is fused into the update.

    Args:
        chain: the model.
        plan: its plan.
        params: `{segment: tree}`, the same on all devices.
        batch_stats: likewise.
        images: this device's block, preprocessed, shape (local_batch, height, width, channels).
        labels: int32, shape (local_batch,).
        mask: float32, shape (local_batch,).
        global_batch: examples over all devices when nothing is padding.
        key: for dropout and the like.

    Returns:
        Every region's tensor by name, bitwise the same on all devices: `results` is the sum over the devices,
        everything else the mean over the real examples.
    """
    params, batch_stats = collectives.vary(params), collectives.vary(batch_stats)
    pullbacks: dict[str, Callable] = {}
    next_stats: dict[str, Any] = {}
    x = images
    for index, (name, module) in enumerate(chain.items()):
        forward = partial(_forward, module, batch_stats[name], mask=mask, key=jax.random.fold_in(key, index))
        x, pullbacks[name], next_stats[name] = jax.vjp(forward, params[name], x, has_aux=True)

    _, pull_loss, results = jax.vjp(lambda logits: score(logits, labels, mask), x, has_aux=True)
    share = mask.sum() / global_batch
    leaves = name_leaves(next_stats) | {"results": results}

    (cotangent,) = pull_loss(collectives.vary(jnp.float32(1 / global_batch)))
    reduced: dict[str, jax.Array] = {}
    previous, scale = None, None
    for name in reversed(tuple(chain)):
        gradients, cotangent = pullbacks[name](cotangent)
        leaves |= name_leaves({name: gradients})
        for group in plan.groups:
            if group.launch_after == name:
                with jax.named_scope(f"all_reduce_{group.name}"):  # by which a reader of the program knows it
                    previous = collectives.sum_group(flatten(group, leaves, share), previous)
                if scale is None:
                    reduced["results"] = unflatten(group, previous)["results"]
                    scale = global_batch / jnp.maximum(reduced["results"][3], 1)
                # Scaled before it is cut: XLA then updates the small leaves in a few kernels, not one for each.
                reduced = unflatten(group, previous * scale) | reduced
    return reduced
