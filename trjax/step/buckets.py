"""Which gradients travel together: the split of every reducer, from names, kinds, sizes and the order of readiness.

A split maps the gradients, in the order in which the backward completes them, to named groups in the order in which
these are launched. It is arithmetic on shapes, and so the same on every process.
"""

import enum
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

ITEM_BYTES = 4
"""Of a gradient as it is made, float32: what bucket limits count."""
MIB_BYTES = 2**20
FIRST_BUCKET_BYTES = MIB_BYTES
"""Limit of the bucket that DistributedDataParallel fills first, `dist._DEFAULT_FIRST_BUCKET_BYTES`."""


class RegionKind(enum.StrEnum):
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
class Tensor:
    """A gradient to be placed.

    Attributes:
        name: path of the parameter in its tree, `segment/.../leaf`.
        kind: what it is the gradient of.
        shape: logical shape.
        segment: its segment's position in the chain.
    """

    name: str
    kind: RegionKind
    shape: tuple[int, ...]
    segment: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the gradient as it is made."""
        return ITEM_BYTES * math.prod(self.shape)


TensorGroups = Mapping[str, Sequence[Tensor]]
"""Gradients by group, groups in the order in which they are launched; none is empty."""
Grouping = Callable[[Sequence[Tensor]], TensorGroups]
"""Puts gradients, given in the order of readiness, into groups."""


def natural_key(name: str) -> list[tuple[int, str]]:
    """Returns a key that sorts numbers inside of names as numbers.

    >>> sorted(["layer10", "layer2"], key=natural_key)
    ['layer2', 'layer10']
    """
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def registration_key(tensor: Tensor) -> tuple[object, ...]:
    """Sorts tensors as PyTorch registers their parameters: by segment and layer, a weight before its bias."""
    parent, _, leaf = tensor.name.rpartition("/")
    return tensor.segment, natural_key(parent), leaf == "bias", natural_key(leaf)


def find_frozen(tensors: Sequence[Tensor], patterns: Sequence[str]) -> frozenset[str]:
    """Returns the names of the parameters that the patterns name.

    Args:
        tensors: all gradients.
        patterns: kinds of region, or names in which `*` stands for anything.

    Raises:
        ValueError: a pattern names no parameter; lists what there is.
    """
    frozen: set[str] = set()
    for pattern in patterns:
        named = {tensor.name for tensor in tensors if tensor.kind == pattern or fnmatchcase(tensor.name, pattern)}
        if not named:
            kinds = sorted({tensor.kind.value for tensor in tensors})
            raise ValueError(
                f"freeze={pattern!r} names no parameter; kinds: {', '.join(kinds)}; names are like {tensors[0].name}"
            )
        frozen |= named
    return frozenset(frozen)


def two_groups(tensors: Sequence[Tensor]) -> TensorGroups:
    """Splits into `deep`, every gradient between first and last segment, and `first`: normalisation, head, stem.

    Source: the buckets of the Tech-Renaissance trainer. A group without gradients vanishes.
    """
    deep = [tensor for tensor in tensors if tensor.kind is RegionKind.G_DEEP_CONV]
    first = [tensor for tensor in tensors if tensor.kind is not RegionKind.G_DEEP_CONV]
    return {name: members for name, members in (("deep", deep), ("first", first)) if members}


def at_launches(segments: Sequence[int], tensors: Sequence[Tensor]) -> TensorGroups:
    """Splits where the backward leaves one of `segments`; the first segment ends a group in any case.

    The groups are `deep1`, `deep2`, ... and `first`, which waits for the first segment.
    """
    ends = sorted({*segments, 0}, reverse=True)
    runs = [
        [tensor for tensor in tensors if end <= tensor.segment < before] for before, end in pairwise([math.inf, *ends])
    ]
    *deep, first = filter(None, runs)
    return {f"deep{index}": run for index, run in enumerate(deep, 1)} | {"first": first}


def one_group(tensors: Sequence[Tensor]) -> TensorGroups:
    """Puts everything into one group, `all`, launched when the backward is done."""
    return {"all": tensors}


def one_each(tensors: Sequence[Tensor]) -> TensorGroups:
    """Gives every gradient a group of its own, `leaf1`, `leaf2`, ..."""
    return {f"leaf{index}": [tensor] for index, tensor in enumerate(tensors, 1)}


def fill_buckets(tensors: Sequence[Tensor], limits_bytes: Sequence[int]) -> list[list[Tensor]]:
    """Fills one bucket after the other; the tensor that reaches a bucket's limit is the last in it.

    Source: `compute_bucket_assignment_by_size` in PyTorch's `reducer.cpp`, for gradients of one type and device.

    Args:
        tensors: in the order in which they come.
        limits_bytes: of the first buckets; the last limit holds for all that follow.
    """
    buckets: list[list[Tensor]] = [[]]
    size_bytes = 0
    for tensor in tensors:
        if size_bytes >= limits_bytes[min(len(buckets), len(limits_bytes)) - 1] and buckets[-1]:
            buckets.append([])
            size_bytes = 0
        buckets[-1].append(tensor)
        size_bytes += tensor.size_bytes
    return buckets


def ddp_buckets(bucket_bytes: int, rebuilt: bool, tensors: Sequence[Tensor]) -> TensorGroups:
    """Splits as PyTorch's DistributedDataParallel does, `bucket1`, `bucket2`, ... in the order of launch.

    Before the first step buckets are filled in the order of registration, then their list is reversed. Afterwards
    they are rebuilt in the order in which gradients arrived: a layer's bias before its weight, the last layer first.
    The first one filled holds 1 MiB, the others `bucket_bytes`; with 0 every gradient is a bucket. PyTorch itself uses
    the first list with `find_unused_parameters` only (without, its first step has a single bucket), and the limit of 1
    MiB only where `bucket_cap_mb` is left at 25.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020; torch 2.13.
    """
    limits_bytes = (min(FIRST_BUCKET_BYTES, bucket_bytes), bucket_bytes)
    registered = sorted(tensors, key=registration_key)
    buckets = fill_buckets(registered[::-1] if rebuilt else registered, limits_bytes)
    return {f"bucket{index}": bucket for index, bucket in enumerate(buckets if rebuilt else buckets[::-1], 1)}
