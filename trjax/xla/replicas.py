"""Which devices a collective joins, from the attributes that the compiler prints."""

import math
import re
from functools import lru_cache

import numpy as np

ReplicaGroups = tuple[tuple[int, ...], ...]
"""Devices, by their number in the program, that communicate with each other; of a permutation, its pairs."""

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")
_WHOLE = re.compile(r"replica_groups=mesh\[([^\]]*)\]")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


@lru_cache(maxsize=64)  # a ring prints the same thousand pairs at every step
def parse_groups(attributes: str) -> ReplicaGroups:
    """Returns the groups that an instruction's attributes name; empty if they name none: all devices.

    >>> parse_groups("replica_groups={{0,1},{2,3}}, use_global_device_ids=true")
    ((0, 1), (2, 3))
    >>> parse_groups("replica_groups=[2,2]<=[2,2]T(1,0)")
    ((0, 2), (1, 3))
    >>> parse_groups("replica_groups=mesh['hosts'=2,'local'=2] {'hosts'}, dimensions={0}")
    ((0, 2), (1, 3))
    """
    if listed := _LISTED.search(attributes):
        return tuple(_numbers(group) for group in re.findall(r"\{([\d, ]*)\}", listed.group(1)))
    if iota := _IOTA.search(attributes):
        shape, dims, order = (_numbers(text or "") for text in iota.groups())
        grid = np.arange(math.prod(dims)).reshape(dims)
        return _rows(grid.transpose(order or range(len(dims))).reshape(shape))
    if named := _NAMED.search(attributes) or _WHOLE.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named.group(1))}
        joined = re.findall(r"'(\w+)'", named.group(2)) if named.lastindex == 2 else list(sizes)
        grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        kept = [axis for axis, name in enumerate(sizes) if name not in joined]
        order = (*kept, *(axis for axis in range(grid.ndim) if axis not in kept))
        return _rows(grid.transpose(order).reshape(-1, math.prod(sizes[name] for name in joined)))
    return ()


def _rows(grid: np.ndarray) -> ReplicaGroups:
    return tuple(tuple(int(device) for device in row) for row in grid)
