"""Which segments end a group: chosen once, at plan time, so that the link is never waited for if it can be helped.

A fast link wants few groups, a slow one many: the sooner the first leaves, the more backward there is to hide the
others. The choice is arithmetic on shapes and data-sheet numbers, and so the same on every process.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp

from trjax.cost.collectives import predict_all_reduce
from trjax.cost.kernels import predict_kernel
from trjax.cost.machines import Machine
from trjax.models.chain import Chain, apply_segment
from trjax.models.moments import saves_traffic
from trjax.trees import name_leaves

_NORM_PASSES, _EXPANDED_PASSES = 6, 4
"""Times that the backward moves a convolution's output through memory outside of the convolutions: BatchNorm reads it
and its cotangent for their sums, reads both again, and writes the next cotangent; ReLU and the residual sum take four
more after the last of a block. Where `moments.convolve_and_normalise` takes the place of both, that is all. With these
the backward of ResNet-50 takes 20.5 ms on an H100; replayed as compiled, it takes 21.0."""
INDIFFERENT_SECONDS = 2e-5
"""What leaving the default, or a group more, must save: it costs a few kernels too."""


@dataclass(frozen=True)
class SegmentCost:
    """What a segment's backward takes, and what it leaves to reduce."""

    name: str
    backward_seconds: float
    gradient_bytes: int


def list_equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr, and of those that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, list | tuple) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from list_equations(inner)


def _backward_seconds(equation: Any, machine: Machine, num_gradients: int) -> float:
    """Seconds of the backward of one convolution or matrix product, with the normalisation after it."""
    if equation.primitive.name not in ("conv_general_dilated", "dot_general"):
        return 0.0
    left, weights, output = (variable.aval for variable in (*equation.invars, *equation.outvars))
    if equation.primitive.name == "conv_general_dilated":
        channels = weights.shape[equation.params["dimension_numbers"].rhs_spec[0]]
        expanded = weights.size == channels * left.shape[-1] and saves_traffic(
            output.shape[:-1] + left.shape[-1:], channels
        )
        passes = _EXPANDED_PASSES if expanded else _NORM_PASSES
        flops = 2 * output.size * weights.size / channels
    else:
        flops, passes = 2 * output.size * weights.size / max(output.shape[-1], 1), 0
    dtype = {"bfloat16": "bf16", "float16": "f16"}.get(output.dtype.name, "f32")
    sizes = [aval.size * aval.dtype.itemsize for aval in (left, weights, output)]
    one_gradient = predict_kernel(sum(sizes), flops, dtype, machine.target)
    return num_gradients * one_gradient + (predict_kernel(passes * sizes[2], 0, dtype, machine.target) if passes else 0)


def predict_segments(
    chain: Chain, params: Any, batch_stats: Any, image_shape: tuple[int, ...], local_batch: int, machine: Machine
) -> tuple[SegmentCost, ...]:
    """Returns the cost of every segment's backward on one GPU, in forward order, from shapes alone.

    Counted are convolutions and matrix products, both gradients of each (one in the first segment), and a BatchNorm
    after every convolution.

    Args:
        chain: the model.
        params: `{segment: tree}` of shapes.
        batch_stats: likewise.
        image_shape: height, width, channels.
        local_batch: examples on one GPU.
        machine: what it runs on.
    """
    costs: list[SegmentCost] = []
    x: Any = jax.ShapeDtypeStruct((local_batch, *image_shape), jnp.float32)
    mask = jax.ShapeDtypeStruct((local_batch,), jnp.float32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), local_batch))
    for name, module in chain.items():
        forward = partial(apply_segment, module, train=False)  # as in evaluation: no statistics to share
        trace = jax.make_jaxpr(forward, return_shape=True)
        jaxpr, (x, _) = trace(params[name], batch_stats[name], x, mask=mask, keys=keys)
        num_gradients = 2 if costs else 1  # nobody asks for the gradient of the images
        seconds = sum(_backward_seconds(equation, machine, num_gradients) for equation in list_equations(jaxpr.jaxpr))
        size_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in name_leaves(params[name]).values())
        costs.append(SegmentCost(name, seconds, size_bytes))
    return tuple(costs)


def predict_exposed(costs: Sequence[SegmentCost], groups: Sequence[tuple[str, int]], machine: Machine) -> float:
    """Returns the seconds that a step waits for its AllReduces.

    A group overlaps with the backward until the next one is complete: the next is tied to it, and the compiler,
    which does not know the link, waits for it there. The last overlaps with the rest of the backward and the check
    that all that is reduced before is finite; every update waits for that of the last group itself.

    Args:
        costs: of all segments, in forward order.
        groups: the segment after whose backward each group is launched, and its bytes, in order.
        machine: what it runs on.
    """
    names = [cost.name for cost in reversed(costs)]
    ready = dict(zip(names, accumulate(cost.backward_seconds for cost in reversed(costs)), strict=True))
    ends = [ready[segment] for segment, _ in groups]
    hidden = [after - before for before, after in pairwise(ends)]
    hidden.append(ready[names[-1]] - ends[-1] + _check_seconds(sum(size for _, size in groups[:-1]), machine))
    transfers = (predict_all_reduce(size_bytes, machine) for _, size_bytes in groups)
    return sum(max(0.0, transfer - overlap) for transfer, overlap in zip(transfers, hidden, strict=True))


def _check_seconds(size_bytes: int, machine: Machine) -> float:
    return predict_kernel(size_bytes, 0, "f32", machine.target)


def choose_launches(costs: Sequence[SegmentCost], machine: Machine) -> tuple[str, ...]:
    """Returns the segments after whose backward to launch a group, in backward order.

    The least exposed time over all segment boundaries, where every group counts for `INDIFFERENT_SECONDS` more. What a
    group exposes depends on the next boundary alone, so a table over pairs of boundaries finds it.

    >>> from trjax.cost.algorithms import Link
    >>> from trjax.cost.machines import Machine, Topology
    >>> from trjax.cost.targets import TARGETS
    >>> slow = Machine(TARGETS["h100"], Topology(2, 1), Link(1e9, 0.0), Link(1e9, 0.0))
    >>> choose_launches([SegmentCost("a", 0.1, 0), SegmentCost("b", 0.1, 10**8), SegmentCost("c", 0.1, 10**8)], slow)
    ('c', 'b', 'a')
    """
    backward = tuple(reversed(costs))
    ready = [0.0, *accumulate(cost.backward_seconds for cost in backward)]
    sizes = [0, *accumulate(cost.gradient_bytes for cost in backward)]
    last = len(backward)
    # least[start, end]: exposed before the group from `start` to `end` is launched, and the ends of all groups
    least: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {
        (0, end): (0.0, (end,)) for end in range(1, last + 1)
    }
    for start in range(1, last):
        launched = [
            (*least[before, start], predict_all_reduce(sizes[start] - sizes[before], machine))
            for before in range(start)
        ]
        for end in range(start + 1, last + 1):
            least[start, end] = min(
                (exposed + INDIFFERENT_SECONDS + max(0.0, transfer - (ready[end] - ready[start])), (*ends, end))
                for exposed, ends, transfer in launched
            )
    finished = []
    for start in range(last):
        exposed, ends = least[start, last]
        transfer = predict_all_reduce(sizes[last] - sizes[start], machine)
        finished.append((exposed + max(0.0, transfer - _check_seconds(sizes[start], machine)), ends))
    return tuple(backward[end - 1].name for end in min(finished)[1])
