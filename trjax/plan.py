"""Where every gradient lives: regions, tiled without gaps into one flat buffer per group.

A plan is arithmetic on parameter shapes. It touches no device, and every process derives the same one.
The regions and the two groups are those of the Tech-Renaissance trainer: `deep` is reduced while the first
layer's backward still computes, `first` can only start after it.
"""

import enum
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import jax
import jax.numpy as jnp

ConvOrder = Literal["OHWI", "HWIO"]
"""Physical order of convolution kernels: cuDNN wants OHWI, XLA's CPU convolutions HWIO."""

NUM_RESULTS = 4
"""Length of `R_RESULT`: loss sum, top-1 count, top-5 count, example count of one batch."""

BUFFER_ALIGNMENT_BYTES = 256
"""XLA aligns the buffers in an allocation to this on a GPU (its `kXlaAllocatedBufferAlignBytes` is a divisor)."""


class Kind(enum.StrEnum):
    """The purpose of a region, in memory order within its group."""

    G_BN_BIAS = "G_BN_BIAS"
    G_BN_WEIGHT = "G_BN_WEIGHT"
    G_FC_BIAS = "G_FC_BIAS"
    G_FC_WEIGHT = "G_FC_WEIGHT"
    G_FIRST_CONV = "G_FIRST_CONV"
    G_DEEP_CONV = "G_DEEP_CONV"
    R_RESULT = "R_RESULT"
    B_NEXT_MEAN = "B_NEXT_MEAN"
    B_NEXT_VAR = "B_NEXT_VAR"


@dataclass(frozen=True)
class Region:
    """One tensor's place in its group's buffer.

    Attributes:
        name: path of the tensor in its tree, `segment/.../leaf`.
        kind: what the region holds.
        shape: logical shape; `()` never occurs in a convolutional network but is allowed.
        physical_order: the logical dims in the order in which they lie in memory, outermost first.
        offset_elements: start of the region in its group's buffer.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    physical_order: tuple[int, ...]
    offset_elements: int

    @property
    def size_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Group:
    """A contiguous buffer that one AllReduce sums.

    Attributes:
        name: `deep` or `first`; with more groups `deep1`, `deep2`, ..., `first`.
        launch_after: the segment whose backward completes the group.
        regions: in memory order.
        size_elements: length of the buffer, alignment included.
        dtype: element type of the buffer.
    """

    name: str
    launch_after: str
    regions: tuple[Region, ...]
    size_elements: int
    dtype: str = "float32"

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes that one AllReduce of this group reduces."""
        return self.size_elements * self.itemsize_bytes


@dataclass(frozen=True)
class Plan:
    """All groups, in the order in which they are launched."""

    groups: tuple[Group, ...]

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


def name_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by path, `/` between the keys.

    >>> name_leaves({"stem": {"conv": {"kernel": 1}}})
    {'stem/conv/kernel': 1}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def restore_leaves(named: Mapping[str, Any], like: Any) -> Any:
    """Returns a tree of the structure of `like` with the named leaves: the inverse of `name_leaves`."""
    return jax.tree.unflatten(jax.tree.structure(like), [named[name] for name in name_leaves(like)])


def _gradient_kind(name: str, names: set[str], first_segment: str, last_segment: str) -> Kind:
    segment, _, _ = name.partition("/")
    parent, _, leaf = name.rpartition("/")
    if leaf == "scale":
        return Kind.G_BN_WEIGHT
    if leaf == "bias" and f"{parent}/scale" in names:
        return Kind.G_BN_BIAS
    if segment == first_segment:
        # With the stem in `deep`, the large group could not start before the whole backward is done.
        return Kind.G_FIRST_CONV
    if segment == last_segment:
        return Kind.G_FC_BIAS if leaf == "bias" else Kind.G_FC_WEIGHT
    return Kind.G_DEEP_CONV


def physical_order(shape: Sequence[int], conv_order: ConvOrder) -> tuple[int, ...]:
    """Returns the dims of a parameter in memory order: rank 4 is a kernel of logical shape (H, W, I, O).

    >>> physical_order((3, 3, 64, 128), "OHWI")
    (3, 0, 1, 2)
    """
    return (3, 0, 1, 2) if len(shape) == 4 and conv_order == "OHWI" else tuple(range(len(shape)))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _tile(
    name: str,
    tensors: Sequence[tuple[str, Kind, tuple[int, ...]]],
    launch_after: str,
    conv_order: ConvOrder,
    alignment_elements: int,
) -> Group:
    offset, regions = 0, []
    for tensor, kind, shape in tensors:
        order = physical_order(shape, conv_order)
        regions.append(Region(tensor, kind, shape, order, offset))
        offset += math.ceil(math.prod(shape) / alignment_elements) * alignment_elements
    return Group(name, launch_after, tuple(regions), offset)


def _group_names(number: int) -> list[str]:
    """Returns deep1, deep2, ... and, for the last, first: it always waits for the first segment."""
    return [f"deep{index}" for index in range(1, number)] + ["first"]


def make_plan(
    params_shape: Mapping[str, Any],
    batch_stats_shape: Mapping[str, Any],
    segments: Sequence[str],
    *,
    conv_order: ConvOrder = "OHWI",
    alignment_bytes: int = 4,
    launches: Sequence[str] = (),
) -> Plan:
    """Lays out all gradients, the results of the batch and the BatchNorm statistics in groups.

    Two groups by default: `deep` holds the gradients of every segment between the first and the last, last layer
    first, `first` those of normalisation, head and first segment. With `launches` a gradient of any kind leaves
    with the next launch after its segment's backward. `R_RESULT` ends the first group that is launched, the
    BatchNorm statistics end the last. A group without gradients vanishes.

    Args:
        params_shape: `{segment: tree}` of float32 shapes, from `jax.eval_shape`.
        batch_stats_shape: the same for the running statistics.
        segments: segment names in forward order (trees come back from JAX with sorted keys).
        conv_order: physical order of rank-4 kernels.
        alignment_bytes: every region starts at a multiple of this; 4 leaves no gap.
        launches: segments after whose backward a group is launched, in any order; empty: the two groups. The
            first segment ends a group in any case.

    Raises:
        ValueError: a parameter is not float32, a tree or a launch names an unknown segment, there is no
            parameter, or the alignment is not a multiple of 4 bytes.
    """
    if alignment_bytes < 4 or alignment_bytes % 4:
        raise ValueError(f"alignment_bytes={alignment_bytes} is not a positive multiple of 4, the float32 size")
    params, stats = name_leaves(params_shape), name_leaves(batch_stats_shape)
    for name, leaf in (params | stats).items():
        if leaf.dtype != jnp.float32:
            raise ValueError(
                f"{name} is {leaf.dtype}; parameters and statistics are float32: pass `dtype` "
                "to the module to compute in another type"
            )
        if name.partition("/")[0] not in segments:
            raise ValueError(f"{name} belongs to no segment of the chain: {', '.join(segments)}")
    for segment in launches:
        if segment not in segments:
            raise ValueError(f"launches: {segment} is no segment of the chain: {', '.join(segments)}")
    if not params:
        raise ValueError("the chain has no parameters: there is nothing to train")

    position = {segment: index for index, segment in enumerate(segments)}
    # Readiness order: the backward reaches the last segment, and in it the last layer, first.
    ready = sorted(params, key=lambda name: (position[name.partition("/")[0]], _natural(name)), reverse=True)
    kinds = {name: _gradient_kind(name, set(params), segments[0], segments[-1]) for name in ready}
    if launches:
        ends = sorted({position[segment] for segment in launches} | {0}, reverse=True)
        group_of = {name: sum(end > position[name.partition("/")[0]] for end in ends) for name in ready}
    else:
        group_of = {name: int(kinds[name] is not Kind.G_DEEP_CONV) for name in ready}
    present = sorted(set(group_of.values()))
    tensors = [[(name, kinds[name], tuple(params[name].shape)) for name in ready if group_of[name] == index]
               for index in present]  # fmt: skip
    tensors[0].append(("results", Kind.R_RESULT, (NUM_RESULTS,)))
    for name, leaf in stats.items():
        kind = Kind.B_NEXT_MEAN if "mean" in name.rpartition("/")[2] else Kind.B_NEXT_VAR
        tensors[-1].append((name, kind, tuple(leaf.shape)))
    names = _group_names(len(present)) if launches else [("deep", "first")[index] for index in present]
    groups = []
    for name, members in zip(names, tensors, strict=True):
        members.sort(key=lambda tensor: list(Kind).index(tensor[1]))  # stable: readiness order within a kind
        last = min(position[tensor.partition("/")[0]] for tensor, _, _ in members if tensor in params)
        groups.append(_tile(name, members, segments[last], conv_order, alignment_bytes // 4))
    return Plan(tuple(groups))


def flatten(group: Group, leaves: Mapping[str, jax.Array], share: jax.Array | float = 1.0) -> jax.Array:
    """Returns the group's buffer, 1-D, with every region's tensor in its physical order at its offset.

    On a GPU the concatenation writes straight into the buffer that the AllReduce works on, and casts on the way.

    Args:
        group: where the tensors go.
        leaves: tensors by name.
        share: weight of this device's BatchNorm statistics in the sum, float32, shape ().
    """
    gradients: list[jax.Array] = []
    statistics: list[jax.Array] = []
    end = 0
    for region in group.regions:
        pieces = statistics if region.kind in (Kind.B_NEXT_MEAN, Kind.B_NEXT_VAR) else gradients
        pieces.append(jnp.zeros(region.offset_elements - end, group.dtype))
        pieces.append(leaves[region.name].transpose(region.physical_order).reshape(-1).astype(group.dtype))
        end = region.offset_elements + region.size_elements
    padding = jnp.zeros(group.size_elements - end, group.dtype)
    if not statistics:
        return _concatenate([*gradients, padding])
    # Weighted as one vector: XLA splits concatenations of more than 128 arrays, and would move the gradients twice.
    return _concatenate([*gradients, _concatenate([*statistics, padding]) * share])


def _concatenate(pieces: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([piece for piece in pieces if piece.size])


def unflatten(group: Group, buffer: jax.Array) -> dict[str, jax.Array]:
    """Returns the tensors of a group by name, in their logical shapes: the inverse of `flatten`."""
    leaves = {}
    for region in group.regions:
        flat = jax.lax.slice(buffer, (region.offset_elements,), (region.offset_elements + region.size_elements,))
        physical = flat.reshape([region.shape[dim] for dim in region.physical_order])
        inverse = sorted(range(len(region.shape)), key=region.physical_order.__getitem__)
        leaves[region.name] = physical.transpose(inverse)
    return leaves
