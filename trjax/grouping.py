"""Which segments end a group: chosen once, at plan time, so that the link is never waited for if it can be helped.

A fast link wants few groups, a slow one many: the sooner the first leaves, the more backward there is to hide the
others. The choice is arithmetic on shapes and data-sheet numbers, and so the same on every process.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp

from trjax.chain import Chain, apply_segment
from trjax.cost import Machine, predict_all_reduce, predict_kernel
from trjax.plan import name_leaves

_NORM_PASSES = 5
"""Times that the backward moves a convolution's output through memory outside of the convolutions: BatchNorm reads it
and its cotangent for their sums, reads both again, and writes the next cotangent."""
_UPDATE_PASSES = 5
"""Times that an update moves a parameter: gradient, parameter and momentum read, the latter two written."""
_MAX_GROUPS = 12
_INDIFFERENT_SECONDS = 2e-5
"""A group more must save this much: it costs a few kernels too."""


@dataclass(frozen=True)
class SegmentCost:
    """What a segment's backward takes, and what it leaves to reduce."""

    name: str
    backward_seconds: float
    gradient_bytes: int


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, list | tuple) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def _backward_seconds(equation: Any, machine: Machine) -> float:
    """Seconds of the backward of one convolution or matrix product, with the normalisation behind it."""
    if equation.primitive.name not in ("conv_general_dilated", "dot_general"):
        return 0.0
    left, weights, output = (variable.aval for variable in (*equation.invars, *equation.outvars))
    if equation.primitive.name == "conv_general_dilated":
        channels = weights.shape[equation.params["dimension_numbers"].rhs_spec[0]]
        flops, passes = 2 * output.size * weights.size / channels, _NORM_PASSES
    else:
        flops, passes = 2 * output.size * weights.size / max(output.shape[-1], 1), 0
    dtype = {"bfloat16": "bf16", "float16": "f16"}.get(output.dtype.name, "f32")
    sizes = [aval.size * aval.dtype.itemsize for aval in (left, weights, output)]
    one_gradient = predict_kernel(sum(sizes), flops, dtype, machine.target)
    return 2 * one_gradient + (predict_kernel(passes * sizes[2], 0, dtype, machine.target) if passes else 0)


def predict_segments(
    chain: Chain, params: Any, batch_stats: Any, image_shape: tuple[int, ...], local_batch: int, machine: Machine
) -> tuple[SegmentCost, ...]:
    """Returns the cost of every segment's backward on one GPU, in forward order, from shapes alone.

    Counted are convolutions and matrix products, both gradients of each, and a BatchNorm behind every convolution.

    Args:
        chain: the model.
        params: `{segment: tree}` of shapes.
        batch_stats: likewise.
        image_shape: height, width, channels.
        local_batch: examples on one GPU.
        machine: what it runs on.
    """
    costs = []
    x: Any = jax.ShapeDtypeStruct((local_batch, *image_shape), jnp.float32)
    mask, key = jax.ShapeDtypeStruct((local_batch,), jnp.float32), jax.eval_shape(lambda: jax.random.key(0))
    for name, module in chain.items():
        forward = partial(apply_segment, module, train=False)  # as in evaluation: no statistics to share
        trace = jax.make_jaxpr(forward, return_shape=True)
        jaxpr, (x, _) = trace(params[name], batch_stats[name], x, mask=mask, key=key)
        seconds = sum(_backward_seconds(equation, machine) for equation in _equations(jaxpr.jaxpr))
        size_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in name_leaves(params[name]).values())
        costs.append(SegmentCost(name, seconds, size_bytes))
    return tuple(costs)


def predict_exposed(costs: Sequence[SegmentCost], groups: Sequence[tuple[str, int]], machine: Machine) -> float:
    """Returns the seconds that a step waits for its AllReduces.

    They run one after the other, each from when its group is complete; behind them runs the rest of the
    backward, and behind the last one the update of all that is reduced before.

    Args:
        costs: of all segments, in forward order.
        groups: the segment after whose backward each group is launched, and its bytes, in order.
        machine: what it runs on.
    """
    seconds = [cost.backward_seconds for cost in reversed(costs)]
    ready = dict(zip((cost.name for cost in reversed(costs)), accumulate(seconds), strict=True))
    link = 0.0
    for segment, size_bytes in groups:
        link = max(link, ready[segment]) + predict_all_reduce(size_bytes, machine)
    updated_bytes = sum(size_bytes for _, size_bytes in groups[:-1])
    update = predict_kernel(_UPDATE_PASSES * updated_bytes, 0, "f32", machine.target)
    return max(0.0, link - sum(seconds) - update)


def choose_launches(costs: Sequence[SegmentCost], machine: Machine) -> tuple[str, ...]:
    """Returns the segments after whose backward to launch a group, in backward order.

    The fewest groups among those whose exposed time is least, exact over all segment boundaries: with k groups
    that cover the backward up to a boundary, only the earliest end of their transfers matters.

    >>> from trjax.cost import Link, Machine, Topology
    >>> from trjax.targets import TARGETS
    >>> slow = Machine(TARGETS["h100"], Topology(2, 1), Link(1e9, 0.0), Link(1e9, 0.0))
    >>> choose_launches([SegmentCost("a", 0.1, 0), SegmentCost("b", 0.1, 10**8), SegmentCost("c", 0.1, 10**8)], slow)
    ('c', 'b', 'a')
    """
    backward = tuple(reversed(costs))
    ready = [0.0, *accumulate(cost.backward_seconds for cost in backward)]
    sizes = [0, *accumulate(cost.gradient_bytes for cost in backward)]
    number = len(backward)
    # reached[j]: when the transfers of the groups that cover the first j segments end at the earliest, and the groups
    nowhere: tuple[float, tuple[int, ...]] = (math.inf, ())
    reached = [(0.0, nowhere[1])] + [nowhere] * number
    choices = []
    for _ in range(min(number, _MAX_GROUPS)):
        longer = [nowhere]
        for end in range(1, number + 1):
            longer.append(
                min(
                    (max(done, ready[end]) + predict_all_reduce(sizes[end] - sizes[start], machine), (*ends, end))
                    for start, (done, ends) in enumerate(reached[:end])
                )
            )
        reached = longer
        choices.append(reached[number][1])
    exposed = []
    for ends in choices:
        groups = [(backward[end - 1].name, sizes[end] - sizes[start]) for start, end in pairwise((0, *ends))]
        exposed.append(predict_exposed(costs, groups, machine))
    best = next(index for index, seconds in enumerate(exposed) if seconds <= min(exposed) + _INDIFFERENT_SECONDS)
    return tuple(backward[end - 1].name for end in choices[best])
