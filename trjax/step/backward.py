"""The staged backward: one pullback per segment, run in reverse, each group summed when it is complete."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from trjax.data.batches import Batch
from trjax.data.mixing import Inputs
from trjax.keys import example_keys
from trjax.models.chain import Chain, apply_segment, list_spans
from trjax.step import collectives
from trjax.step.collectives import Launch
from trjax.step.packing import STATISTICS, all_finite, cut, flatten, unflatten
from trjax.step.plan import Group, Plan
from trjax.step.scores import score
from trjax.trees import name_leaves, restore_leaves

Leaves = Mapping[str, jax.Array]
Prepare = Callable[[Batch], Inputs]
"""Maps a block of examples to the network's input and the targets."""


@dataclass(frozen=True)
class Recipe:
    """How the gradients of a step come about.

    Attributes:
        chain: the model.
        plan: its plan; parameters that it does not hold are frozen, and have no gradient.
        global_batch: examples over all devices and micro-batches when nothing is padding.
        launch: sums a group over the devices.
        statistics: of BatchNorm: the mean over the devices, weighted by their examples, or those of the first.
        micro_batches: into which a block is split, along a dim of its own if there are more than one.
        sharded: `launch` gives this device's shard of the sum.
        remat: what of the forward the backward computes again in place of keeping it: the inside of every segment
            (`block`), or of every stage, those segments in a row whose names are the same up to the last underscore.
    """

    chain: Chain
    plan: Plan
    global_batch: int
    launch: Launch
    statistics: Literal["mean", "first"] = "mean"
    micro_batches: int = 1
    sharded: bool = False
    remat: Literal["none", "stage", "block"] = "none"


def _forward(
    chain: Chain, params: Any, frozen: Leaves, batch_stats: Any, keys: Mapping[str, jax.Array], mask: jax.Array,
    trained: Mapping[str, Leaves], x: jax.Array,
) -> tuple[jax.Array, dict[str, Any]]:  # fmt: skip
    """Applies the segments of `trained`; returns their output, and their new statistics."""
    next_stats = {}
    for segment, own in trained.items():
        tree = restore_leaves({**frozen, **own}, {segment: params[segment]})[segment]
        x, next_stats[segment] = apply_segment(
            chain[segment], tree, batch_stats[segment], x, train=True, mask=mask, keys=keys[segment]
        )
    return x, next_stats


def _differentiate(
    recipe: Recipe, params: Any, batch_stats: Any, inputs: Inputs, block: Batch, key: jax.Array,
    loss_scale: jax.Array | float, complete: Callable[[Group, Leaves], None], vote: jax.Array | float = 0.0,
) -> Any:  # fmt: skip
    """Runs forward and backward, and calls `complete` with every group as soon as its tensors are there.

    The segments below the lowest one that is trained have no backward.

    Returns:
        The new BatchNorm statistics.
    """
    named = name_leaves(params)
    planned = {region.name for region in recipe.plan.regions}
    frozen = {name: leaf for name, leaf in named.items() if name not in planned}
    trained = {
        segment: {name: leaf for name, leaf in name_leaves({segment: params[segment]}).items() if name in planned}
        for segment in recipe.chain
    }
    pullbacks: dict[tuple[str, ...], Callable] = {}
    next_stats: dict[str, Any] = {}
    keys = {
        segment: example_keys(jax.random.fold_in(key, index), block.indices)
        for index, segment in enumerate(recipe.chain)
    }
    forward = partial(_forward, recipe.chain, params, frozen, batch_stats, keys, block.mask)
    kept = forward if recipe.remat == "none" else jax.checkpoint(forward)
    x = inputs.images
    for span in list_spans(recipe.chain, recipe.remat):
        own = {segment: trained[segment] for segment in span}
        if pullbacks or any(own.values()):
            x, pullbacks[span], stats = jax.vjp(kept, own, x, has_aux=True)
        else:
            x, stats = forward(own, x)
        next_stats |= stats

    measure = partial(score, labels=block.labels, mask=block.mask, targets=inputs.targets)
    _, pull_loss, scores = jax.vjp(measure, x, has_aux=True)
    leaves = name_leaves(next_stats) | {"results": jnp.append(scores, vote)}
    (cotangent,) = pull_loss(collectives.vary(jnp.asarray(np.float32(1 / recipe.global_batch) * loss_scale)))
    for span, pull in reversed(pullbacks.items()):
        gradients, cotangent = pull(cotangent)
        if recipe.remat != "none":  # the compiler would leave filter gradients for last, and keep all that they need
            gradients, cotangent = jax.lax.optimization_barrier((gradients, cotangent))
        for segment in reversed(span):
            leaves |= gradients[segment]
            for group in recipe.plan.groups:
                if group.launch_after == segment:
                    complete(group, leaves)
    return next_stats


def _accumulate(
    recipe: Recipe,
    params: Any,
    batch_stats: Any,
    blocks: Batch,
    prepare: Prepare,
    key: jax.Array,
    loss_scale: jax.Array | float,
) -> tuple[dict[str, jax.Array], Any]:
    """Runs all micro-batches but the last, one after the other, and adds up their gradients and results.

    Returns:
        Every group's buffer, float32, with zeros for the BatchNorm statistics; and these.
    """

    def run(carry: tuple[dict[str, jax.Array], Any], block: Batch) -> tuple[Any, None]:
        sums, stats = carry
        sums = dict(sums)

        def add(group: Group, leaves: Leaves) -> None:
            none = {region.name: jnp.zeros(region.shape) for region in group.regions if region.kind in STATISTICS}
            sums[group.name] += flatten(group, {**leaves, **none}, dtype="float32")

        stats = _differentiate(recipe, params, stats, prepare(block), block, key, loss_scale, add)
        return (sums, stats), None

    zeros = {group.name: collectives.vary(jnp.zeros(group.size_elements)) for group in recipe.plan.groups}
    carry, _ = jax.lax.scan(run, (zeros, batch_stats), blocks)
    return carry


def _scaled(recipe: Recipe, sums: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns every region's tensor, or this device's shard of it, from the summed buffers."""
    exact = {"results"}
    if recipe.statistics == "first":
        exact |= {region.name for region in recipe.plan.regions if region.kind in STATISTICS}
    take = cut if recipe.sharded else unflatten
    buffers = [(group, sums[group.name].astype(jnp.float32)) for group in recipe.plan.groups]
    unscaled = {name: leaf for pair in buffers for name, leaf in take(*pair).items() if name in exact}
    scale = recipe.global_batch / jnp.maximum(unscaled["results"][3], 1)
    # Scaled before it is cut: XLA then updates the small leaves in a few kernels, not one for each.
    reduced = {name: leaf for group, buffer in buffers for name, leaf in take(group, buffer * scale).items()}
    return reduced | unscaled


def _check(sums: dict[str, jax.Array]) -> jax.Array:
    """Returns whether all sums are finite; leaves the last of them waiting until the others have been checked.

    Every update waits for the last group, which has nothing but that check to hide behind.
    """
    *names, last = sums
    if not names:
        return all_finite(sums.values())
    others = all_finite(sums[name] for name in names)
    sums[last], others = jax.lax.optimization_barrier((sums[last], others))
    return others & all_finite([sums[last]])


def reduce_gradients(
    recipe: Recipe,
    params: Any,
    batch_stats: Any,
    block: Batch,
    prepare: Prepare,
    key: jax.Array,
    vote: jax.Array | float = 0.0,
    loss_scale: jax.Array | float = 1.0,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Runs forward and backward on this device's block and sums every group over the devices.

    The loss is divided by `global_batch` before the backward, so that the sum over the devices is the mean
    over the global batch, without a scale kernel, and fits a narrow type. A device's BatchNorm statistics count by
    its share of the examples. Where padding leaves fewer than `global_batch` examples, a factor
    `global_batch / count`, with the count from the results, makes it the mean of the real ones; it is fused into the
    update.

    With several micro-batches all but the last run in a loop; the last adds what they have left to each of its groups
    before it is launched: one reduction of each group in any case, behind the rest of the last backward.

    Args:
        recipe: how.
        params: `{segment: tree}`, the same on all devices.
        batch_stats: likewise.
        block: this device's examples, leading dim (local_batch,), or (micro_batches, examples) if there are several.
        prepare: maps a block of examples to the network's input.
        key: for dropout and the like, the same on all devices; each example's index is folded into it.
        vote: 1 if this device asks to stop, float32, shape ().
        loss_scale: factor of all gradients, so that small ones do not vanish in float16; float32, shape ().

    Returns:
        Every region's tensor by name, bitwise the same on all devices: `results` is the sum over the devices,
        everything else the mean over the real examples. Of a reducer to shards, this device's shards.
        And whether all that was summed is finite.
    """
    params, batch_stats = collectives.vary(params), collectives.vary(batch_stats)
    examples = block.mask.sum()
    carried: dict[str, jax.Array] = {}
    if recipe.micro_batches > 1:
        first, block = (jax.tree.map(lambda leaf, part=part: leaf[part], block) for part in (slice(-1), -1))
        carried, batch_stats = _accumulate(recipe, params, batch_stats, first, prepare, key, loss_scale)
        # The last one starts behind the others: a loop of one turn is inlined, and both would be in memory at once.
        block = jax.lax.optimization_barrier((carried, block))[1]
    share = examples / recipe.global_batch
    if recipe.statistics == "first":
        share = (collectives.device_index() == 0).astype(jnp.float32)
    sums: dict[str, jax.Array] = {}
    previous: jax.Array | None = None

    def launch(group: Group, leaves: Leaves) -> None:
        nonlocal previous
        if carried:
            buffer = (flatten(group, leaves, share, "float32") + carried[group.name]).astype(group.dtype)
        else:
            buffer = flatten(group, leaves, share)
        with jax.named_scope(f"all_reduce_{group.name}"):  # by which a reader of the program knows it
            previous = sums[group.name] = recipe.launch(buffer, previous)

    _differentiate(recipe, params, batch_stats, prepare(block), block, key, loss_scale, launch, vote)
    finite = _check(sums)
    return _scaled(recipe, sums), finite
