"""Where every gradient lives: regions, tiled without gaps into one flat buffer per group.

A plan is arithmetic on parameter shapes. It touches no device, and every process derives the same one.
The regions are those of the Tech-Renaissance trainer; which of them form a group is the choice of a split,
`buckets.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import jax.numpy as jnp

from trjax.step.buckets import Grouping, RegionKind, Tensor, natural_key, two_groups
from trjax.trees import name_leaves

ConvOrder = Literal["OHWI", "HWIO"]
"""Physical order of convolution kernels: cuDNN wants OHWI, XLA's CPU convolutions HWIO."""

NUM_SCORES = 4
"""Loss sum, top-1 count, top-5 count, example count of one batch."""
NUM_RESULTS = NUM_SCORES + 1
"""Length of `R_RESULT`: the scores, and the devices that ask to stop: all learn of it with the same step."""

BUFFER_ALIGNMENT_BYTES = 256
"""XLA aligns the buffers in an allocation to this on a GPU (its `kXlaAllocatedBufferAlignBytes` is a divisor)."""


@dataclass(frozen=True)
class Region:
    """One tensor's place in its group's buffer.

    Attributes:
        name: path of the tensor in its tree, `segment/.../leaf`.
        kind: what the region holds.
        shape: logical shape; `()` never occurs in a convolutional network but is allowed.
        physical_order: the logical dims in the order in which they lie in memory, outermost first.
        offset_elements: start of the region in its group's buffer, or in each shard of it.
        shard_elements: length of the region in each shard; the whole of `R_RESULT` lies in every one.
    """

    name: str
    kind: RegionKind
    shape: tuple[int, ...]
    physical_order: tuple[int, ...]
    offset_elements: int
    shard_elements: int

    @property
    def size_elements(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Group:
    """A contiguous buffer that is reduced at once.

    Attributes:
        name: that its split gave it, `deep` or `first` for instance.
        launch_after: the segment whose backward completes the group.
        regions: in memory order.
        size_elements: length of the buffer, alignment and padding included.
        dtype: element type of the buffer.
        shards: equal parts that lie one behind the other, each with a part of every region.
    """

    name: str
    launch_after: str
    regions: tuple[Region, ...]
    size_elements: int
    dtype: str = "float32"
    shards: int = 1

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.size_elements * self.itemsize_bytes


@dataclass(frozen=True)
class Plan:
    """All groups, in the order in which they are launched; and the chain's segments, in forward order."""

    groups: tuple[Group, ...]
    segments: tuple[str, ...]

    @property
    def offsets_bytes(self) -> tuple[int, ...]:
        """Start of each group in the one allocation that holds them all: the largest first, as XLA packs them."""
        packed = sorted(self.groups, key=lambda group: -group.size_bytes)
        blocks = (math.ceil(group.size_bytes / BUFFER_ALIGNMENT_BYTES) for group in packed)
        starts = accumulate((count * BUFFER_ALIGNMENT_BYTES for count in blocks), initial=0)
        offset = {group.name: start for group, start in zip(packed, starts, strict=False)}
        return tuple(offset[group.name] for group in self.groups)

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions of all groups, in memory order."""
        return tuple(region for group in self.groups for region in group.regions)

    @property
    def shards(self) -> int:
        """Parts into which every buffer is laid out."""
        return self.groups[0].shards

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that have a gradient."""
        return frozenset(region.name for region in self.regions if region.kind.value.startswith("G_"))


def _gradient_kind(name: str, names: set[str], first_segment: str, last_segment: str) -> RegionKind:
    segment, _, _ = name.partition("/")
    parent, _, leaf = name.rpartition("/")
    if leaf == "scale":
        return RegionKind.G_BN_WEIGHT
    if leaf == "bias" and f"{parent}/scale" in names:
        return RegionKind.G_BN_BIAS
    if segment == first_segment:
        # With the stem in `deep`, the large group could not start before the whole backward is done.
        return RegionKind.G_FIRST_CONV
    if segment == last_segment:
        return RegionKind.G_FC_BIAS if leaf == "bias" else RegionKind.G_FC_WEIGHT
    return RegionKind.G_DEEP_CONV


def physical_order(shape: Sequence[int], conv_order: ConvOrder) -> tuple[int, ...]:
    """Returns the dims of a parameter in memory order: rank 4 is a kernel of logical shape (H, W, I, O).

    >>> physical_order((3, 3, 64, 128), "OHWI")
    (3, 0, 1, 2)
    """
    return (3, 0, 1, 2) if len(shape) == 4 and conv_order == "OHWI" else tuple(range(len(shape)))


def list_tensors(params_shape: Any, segments: Sequence[str]) -> list[Tensor]:
    """Returns the gradients in the order of readiness: the backward reaches the last layer of the last segment first.

    Args:
        params_shape: `{segment: tree}` of shapes.
        segments: segment names in forward order.
    """
    params = name_leaves(params_shape)
    position = {segment: index for index, segment in enumerate(segments)}
    tensors = []
    for name, leaf in params.items():
        kind = _gradient_kind(name, set(params), segments[0], segments[-1])
        tensors.append(Tensor(name, kind, tuple(leaf.shape), position[name.partition("/")[0]]))
    return sorted(tensors, key=lambda tensor: (tensor.segment, natural_key(tensor.name)), reverse=True)


def _check(tensors: Mapping[str, Any], segments: Sequence[str]) -> None:
    for name, leaf in tensors.items():
        if leaf.dtype != jnp.float32:
            raise ValueError(
                f"{name} is {leaf.dtype}; parameters and statistics are float32: pass `dtype` "
                "to the module to compute in another type"
            )
        if name.partition("/")[0] not in segments:
            raise ValueError(f"{name} belongs to no segment of the chain: {', '.join(segments)}")


def _passengers(stats: Mapping[str, Any], last_segment: int) -> tuple[Tensor, list[Tensor]]:
    """Returns the results of the batch and the BatchNorm statistics, complete when the forward is."""
    results = Tensor("results", RegionKind.R_RESULT, (NUM_RESULTS,), last_segment)
    statistics = []
    for name, leaf in stats.items():
        kind = RegionKind.B_NEXT_MEAN if "mean" in name.rpartition("/")[2] else RegionKind.B_NEXT_VAR
        statistics.append(Tensor(name, kind, tuple(leaf.shape), last_segment))
    return results, statistics


@dataclass(frozen=True)
class PlanSpec:
    """How a plan lays out tensors.

    Attributes:
        split: which gradients form a group.
        conv_order: physical order of rank-4 kernels.
        frozen: names of the parameters that have no gradient.
        comm_dtype: element type in which gradients are reduced.
        shards: parts into which every buffer is laid out, each region padded to a multiple of them.
        bundled: False reduces results and every statistic by themselves.
    """

    split: Grouping = two_groups
    conv_order: ConvOrder = "OHWI"
    frozen: frozenset[str] = frozenset()
    comm_dtype: str = "float32"
    shards: int = 1
    bundled: bool = True


def _tile(members: Sequence[Tensor], spec: PlanSpec) -> tuple[tuple[Region, ...], int]:
    """Returns the regions of a group without gaps, in memory order, and the elements of one of its shards."""
    kinds = list(RegionKind)
    offset, regions = 0, []
    # A stable sort: within a kind, the order of readiness stays.
    for tensor in sorted(members, key=lambda tensor: kinds.index(tensor.kind)):
        elements = math.prod(tensor.shape)
        elements = elements if tensor.kind is RegionKind.R_RESULT else math.ceil(elements / spec.shards)
        order = physical_order(tensor.shape, spec.conv_order)
        regions.append(Region(tensor.name, tensor.kind, tensor.shape, order, offset, elements))
        offset += elements
    return tuple(regions), offset


def make_plan(
    params_shape: Mapping[str, Any],
    batch_stats_shape: Mapping[str, Any],
    segments: Sequence[str],
    spec: PlanSpec = PlanSpec(),
) -> Plan:
    """Lays out all gradients, the results of the batch and the BatchNorm statistics in groups.

    `R_RESULT` ends the first group that is launched, the BatchNorm statistics end the last. Both travel in float32:
    where the gradients do not, they form a group of their own, `rest`, launched last.

    Args:
        params_shape: `{segment: tree}` of float32 shapes, from `jax.eval_shape`.
        batch_stats_shape: the same for the running statistics.
        segments: segment names in forward order (trees come back from JAX with sorted keys).
        spec: which gradients form a group, and how they lie in it.

    Raises:
        ValueError: a parameter is not float32, a tree names an unknown segment, or there is no parameter to train.
    """
    stats = name_leaves(batch_stats_shape)
    _check(name_leaves(params_shape) | stats, segments)
    trained = [tensor for tensor in list_tensors(params_shape, segments) if tensor.name not in spec.frozen]
    if not trained:
        raise ValueError("there are no parameters to train: the chain has none, or all are frozen")
    groups = {name: list(members) for name, members in spec.split(trained).items()}
    dtypes = dict.fromkeys(groups, spec.comm_dtype)
    results, statistics = _passengers(stats, len(segments) - 1)
    if not spec.bundled:
        groups = {"results": [results], **groups}
        groups |= {f"statistic{index}": [tensor] for index, tensor in enumerate(statistics, 1)}
    elif spec.comm_dtype != "float32":
        groups["rest"] = [*statistics, results]
    else:
        names = tuple(groups)
        groups[names[0]].append(results)
        groups[names[-1]] += statistics
    launch_segment, tiled = len(segments) - 1, []
    for name, members in groups.items():  # none starts before one that is launched before it
        launch_segment = min(launch_segment, *(tensor.segment for tensor in members))
        regions, elements = _tile(members, spec)
        dtype = dtypes.get(name, "float32")
        tiled.append(Group(name, segments[launch_segment], regions, spec.shards * elements, dtype, spec.shards))
    return Plan(tuple(tiled), tuple(segments))
