"""The staged backward: one pullback per segment, run in reverse; each group of gradients as soon as it is complete."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trjax.data.batches import Batch, Inputs
from trjax.keys import stream_key
from trjax.models.chain import apply_chain, list_spans, segment_keys
from trjax.step import collectives
from trjax.step.packing import STATISTICS, pack
from trjax.step.plan import Group
from trjax.step.scores import score
from trjax.step.spec import GradientPlan, StepInputs, StepSpec
from trjax.step.state import TrainState
from trjax.trees import name_leaves, restore_leaves

Leaves = Mapping[str, jax.Array]
Prepare = Callable[[Batch], Inputs]
"""Maps a block of examples to the network's input and the targets."""


def start_step(spec: StepSpec, state: TrainState, votes: jax.Array) -> StepInputs:
    """Returns what a step's backward takes from the state, with parameters marked as differing between devices."""
    params, batch_stats = collectives.vary(state.params), collectives.vary(state.batch_stats)
    key = jax.random.fold_in(stream_key(spec.seed, "dropout"), state.step)
    loss_scale = state.loss_scale["scale"] if state.loss_scale else 1.0
    return StepInputs(params, batch_stats, key, loss_scale, votes[0])


def choose_backward(how: GradientPlan) -> Callable[..., Iterator[tuple[Group, jax.Array]]]:
    """Returns the backward of a whole block, or that of several micro-batches."""
    return packed_backward if how.micro_batches == 1 else accumulated_backward


def _make_forward(how: GradientPlan, inputs: StepInputs, block: Batch) -> Callable[..., tuple[jax.Array, Any]]:
    """Returns `(trained, x) -> (output, new statistics)`, which applies the segments that `trained` names."""
    frozen = {name: leaf for name, leaf in name_leaves(inputs.params).items() if name not in how.plan.trained}
    options = {"train": True, "mask": block.mask, "keys": segment_keys(how.chain, inputs.key, block.indices)}

    def forward(trained: Mapping[str, Leaves], x: jax.Array) -> tuple[jax.Array, Any]:
        leaves = frozen | {name: leaf for own in trained.values() for name, leaf in own.items()}
        params = restore_leaves(leaves, {segment: inputs.params[segment] for segment in trained})
        segments = {segment: how.chain[segment] for segment in trained}
        return apply_chain(segments, params, x, batch_stats=inputs.batch_stats, **options)

    return forward


def staged_backward(
    how: GradientPlan, inputs: StepInputs, block: Batch, images: Inputs
) -> Iterator[tuple[Group, Leaves]]:
    """Runs forward and backward, and yields every group as soon as its tensors are there.

    The loss is divided by `global_batch` before the backward, so that the sum over the devices is the mean over the
    global batch, without a scale kernel, and fits a narrow type. The segments below the lowest one that is trained
    have no backward.

    Args:
        how: the model and its plan.
        inputs: parameters and statistics.
        block: labels, mask and indices of this device's examples, leading dim (examples,).
        images: the network's input, and the targets.

    Yields:
        A group of the plan and, by name, all tensors that are complete: its gradients, the new BatchNorm statistics,
        the results.
    """
    named = {segment: name_leaves({segment: inputs.params[segment]}) for segment in how.chain}
    trained = {
        segment: {name: leaf for name, leaf in leaves.items() if name in how.plan.trained}
        for segment, leaves in named.items()
    }
    forward = _make_forward(how, inputs, block)
    kept = forward if how.remat == "none" else jax.checkpoint(forward)
    pullbacks: dict[tuple[str, ...], Callable] = {}
    next_stats: dict[str, Any] = {}
    x = images.images
    for span in list_spans(how.chain, how.remat):
        own = {segment: trained[segment] for segment in span}
        if pullbacks or any(own.values()):
            x, pullbacks[span], stats = jax.vjp(kept, own, x, has_aux=True)
        else:
            x, stats = forward(own, x)
        next_stats |= stats

    measure = partial(score, labels=block.labels, mask=block.mask, targets=images.targets)
    _, pull_loss, scores = jax.vjp(measure, x, has_aux=True)
    leaves = name_leaves(next_stats) | {"results": jnp.append(scores, inputs.vote)}
    (cotangent,) = pull_loss(collectives.vary(jnp.asarray(np.float32(1 / how.global_batch) * inputs.loss_scale)))
    for span, pull in reversed(pullbacks.items()):
        gradients, cotangent = pull(cotangent)
        if how.remat != "none":  # the compiler would leave filter gradients for last, and keep all that they need
            gradients, cotangent = jax.lax.optimization_barrier((gradients, cotangent))
        for segment in reversed(span):
            leaves |= gradients[segment]
            yield from ((group, leaves) for group in how.plan.groups if group.launch_after == segment)


def _statistics_share(how: GradientPlan, examples: jax.Array) -> jax.Array:
    """Returns the weight of this device's BatchNorm statistics in their sum over the devices, float32, shape ()."""
    if how.statistics == "first":
        return (collectives.device_index() == 0).astype(jnp.float32)
    return examples / how.global_batch


def packed_backward(
    how: GradientPlan, inputs: StepInputs, block: Batch, prepare: Prepare
) -> Iterator[tuple[Group, jax.Array]]:
    """Yields every group of the plan with its buffer, 1-D, as soon as all of it is computed: deep, then first.

    Args:
        how: the model and its plan.
        inputs: parameters and statistics.
        block: this device's examples, leading dim (local_batch,).
        prepare: maps a block of examples to the network's input.
    """
    share = _statistics_share(how, block.mask.sum())
    for group, leaves in staged_backward(how, inputs, block, prepare(block)):
        yield group, pack(group, leaves, share)


def _accumulate(how: GradientPlan, inputs: StepInputs, blocks: Batch, prepare: Prepare) -> tuple[dict, Any]:
    """Runs micro-batches one after the other, and adds up their gradients and results.

    Returns:
        Every group's buffer, float32, with zeros for the BatchNorm statistics; and the statistics themselves.
    """

    def run(carry: tuple[dict[str, jax.Array], Any], block: Batch) -> tuple[Any, None]:
        sums, batch_stats = dict(carry[0]), carry[1]
        leaves: Leaves = {}
        for group, leaves in staged_backward(how, inputs._replace(batch_stats=batch_stats), block, prepare(block)):
            none = {region.name: jnp.zeros(region.shape) for region in group.regions if region.kind in STATISTICS}
            sums[group.name] += pack(group, {**leaves, **none}, dtype="float32")
        return (sums, restore_leaves(leaves, batch_stats)), None

    zeros = {group.name: collectives.vary(jnp.zeros(group.size_elements)) for group in how.plan.groups}
    carry, _ = jax.lax.scan(run, (zeros, inputs.batch_stats), blocks)
    return carry


def accumulated_backward(
    how: GradientPlan, inputs: StepInputs, blocks: Batch, prepare: Prepare
) -> Iterator[tuple[Group, jax.Array]]:
    """Does for several micro-batches what `packed_backward` does for a block: one sum over the devices for all.

    All micro-batches but the last run in a loop. The last one adds their sums to each group before the group is
    yielded, so that the reduction of each group still overlaps with the rest of the last backward.

    Args:
        how: the model and its plan.
        inputs: parameters and statistics.
        blocks: this device's examples, leading dims (micro_batches, examples).
        prepare: maps a block of examples to the network's input.
    """
    examples = blocks.mask.sum()
    first, last = (jax.tree.map(lambda leaf, part=part: leaf[part], blocks) for part in (slice(-1), -1))
    carried, batch_stats = _accumulate(how, inputs._replace(vote=0.0), first, prepare)
    # The last one starts after the others: a loop of one iteration is inlined, and both would be in memory at once.
    last = jax.lax.optimization_barrier((carried, last))[1]
    share = _statistics_share(how, examples)
    for group, leaves in staged_backward(how, inputs._replace(batch_stats=batch_stats), last, prepare(last)):
        yield group, (pack(group, leaves, share, "float32") + carried[group.name]).astype(group.dtype)
