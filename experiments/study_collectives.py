"""Sums over the devices written out for study, and what a program sends: counted in what was compiled.

`tree` and `parameter_server` work on the same flat buffers as `step.collectives.ring`, and sum to the same bits on all
devices, which `shard_map` cannot see (`check_vma=False`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from trjax.mesh import AXIS, SPLIT, placement
from trjax.step.collectives import Launch
from trjax.xla.hlo import parse_module
from trjax.xla.operations import list_operations

Pairs = list[tuple[int, int]]
"""Messages of one permutation: source and target."""


def in_order_parents(size: int) -> list[int]:
    """Returns the parent of every position of a binary tree of least depth, read from left to right; -1 at the root.

    Odd positions are inner, even ones are leaves.

    >>> in_order_parents(6)
    [1, 3, 1, -1, 5, 3]
    """
    parents = [-1] * size

    def place(start: int, count: int, parent: int) -> None:
        if count:
            root = ((count - 1) // 2) | 1 if count > 1 else 0
            parents[start + root] = parent
            place(start, root, start + root)
            place(start + root + 1, count - root - 1, start + root)

    place(0, size, -1)
    return parents


def double_tree_parents(world_size: int) -> tuple[list[int], list[int]]:
    """Returns the parent of every rank in two binary trees; a rank is inner in at most one of them.

    The second tree is the first one mirrored, or, of an odd number of ranks, moved on by one.

    Source: Sanders et al., "Two-Tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan", 2009.

    >>> double_tree_parents(4)
    ([1, -1, 3, 1], [2, 0, -1, 2])
    """
    first = in_order_parents(world_size)
    if world_size % 2:
        place, back = (lambda rank: (rank + 1) % world_size), (lambda position: (position - 1) % world_size)
    else:
        place = back = lambda rank: world_size - 1 - rank
    second = [first[place(rank)] for rank in range(world_size)]
    return first, [-1 if parent < 0 else back(parent) for parent in second]


def _levels(parents: Sequence[int]) -> list[list[Pairs]]:
    """Returns the messages from children to parents, deepest level first, each level's left and right children."""

    def depth(rank: int) -> int:
        return 0 if parents[rank] < 0 else 1 + depth(parents[rank])

    levels: list[list[Pairs]] = [[[], []] for _ in range(max(map(depth, range(len(parents)))))]
    taken: set[int] = set()
    for rank, parent in enumerate(parents):
        if parent >= 0:
            levels[-depth(rank)][parent in taken].append((rank, parent))
            taken.add(parent)
    return levels


def _tree_sum(buffer: jax.Array, parents: Sequence[int]) -> jax.Array:
    """Sums up a tree, then sends the sum down it: a message to and from every child, level by level."""
    levels, rank = _levels(parents), jax.lax.axis_index(AXIS)
    for sides in levels:
        received = [jax.lax.ppermute(buffer, AXIS, pairs) for pairs in sides if pairs]
        for part in received:  # zeros at ranks without such a child
            buffer = buffer + part
    for sides in reversed(levels):
        down = [[(parent, child) for child, parent in pairs] for pairs in sides if pairs]
        received = [jax.lax.ppermute(buffer, AXIS, pairs) for pairs in down]
        for pairs, part in zip(down, received, strict=True):
            targets = np.isin(np.arange(len(parents)), [child for _, child in pairs])
            buffer = jnp.where(jnp.asarray(targets)[rank], part, buffer)
    return buffer


def tree(buffer: jax.Array, after: jax.Array | None) -> jax.Array:
    """Sums by a double binary tree: half of the buffer up and down each, level by level, not in chunks.

    A rank sends at most 2 S: as an inner rank half of S up and to each of two children, and half of S up as a leaf of
    the other tree. Steps: twice the depth, at most 2 log2 N rounded up.
    """
    if after is not None:
        buffer = jax.lax.optimization_barrier((after, buffer))[1]
    halves = jnp.split(buffer, [buffer.size // 2])
    trees = double_tree_parents(jax.lax.axis_size(AXIS))
    return jnp.concatenate([_tree_sum(*pair) for pair in zip(halves, trees, strict=True)])


def parameter_server(buffer: jax.Array, after: jax.Array | None) -> jax.Array:
    """Sums at the first rank, which all send to, and which sends the sum to all: 2 steps.

    A rank sends S, the server N - 1 times S, and receives as much: all over one link.
    """
    if after is not None:
        buffer = jax.lax.optimization_barrier((after, buffer))[1]
    workers, rank = range(1, jax.lax.axis_size(AXIS)), jax.lax.axis_index(AXIS)
    received = [jax.lax.ppermute(buffer, AXIS, [(worker, 0)]) for worker in workers]
    total = sum(received, buffer)
    for worker, part in [(worker, jax.lax.ppermute(total, AXIS, [(0, worker)])) for worker in workers]:
        buffer = jnp.where(rank == worker, part, buffer)
    return jnp.where(rank == 0, total, buffer)


def make_sum(launch: Launch, mesh: Mesh) -> Any:
    """Returns the jitted sum: from all devices' buffers, one behind the other, to the sum, once for each device."""
    return jax.jit(
        jax.shard_map(lambda buffer: launch(buffer, None), mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False),
        in_shardings=placement(mesh, SPLIT),
        out_shardings=placement(mesh, SPLIT),
    )


@dataclass(frozen=True)
class Traffic:
    """What a program sends.

    Attributes:
        in_host: bytes that each rank sends to ranks of its own host, shape (ranks,).
        across: bytes that it sends to other hosts, shape (ranks,).
        steps: messages that wait for each other, from first to last.
        calls: collectives.
    """

    in_host: np.ndarray
    across: np.ndarray
    steps: int
    calls: int

    @property
    def bytes_per_rank(self) -> float:
        """The most that a rank sends."""
        return float((self.in_host + self.across).max())


_ROUNDS = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}  # around the ring


def count_traffic(text: str, world_size: int, gpus_per_host: int) -> Traffic:
    """Counts what a compiled program sends, message by message.

    Of the compiler's own collectives it counts what their ring sends: a part to the right neighbour at every step.

    Args:
        text: scheduled HLO.
        world_size: ranks.
        gpus_per_host: of ranks next to each other.

    Raises:
        ValueError: a collective that is not known.
    """
    sent, steps, calls = np.zeros((2, world_size)), {"": 0}, 0
    for operation in list_operations(parse_module(text)):
        before = max((steps.get(name, 0) for name in operation.depends_on), default=0)
        steps[operation.name] = before
        if not operation.collective:
            continue
        calls += 1
        if operation.collective == "collective-permute":
            steps[operation.name] += 1
            messages = [(pair, float(operation.size_bytes)) for pair in operation.groups]
        elif operation.collective in _ROUNDS:
            groups, rounds = operation.groups or (tuple(range(world_size)),), _ROUNDS[operation.collective]
            ranks = len(groups[0])
            whole_bytes = operation.size_bytes * (ranks if operation.collective == "all-gather" else 1)
            steps[operation.name] += rounds * (ranks - 1)
            part_bytes = rounds * (ranks - 1) / ranks * whole_bytes
            rings = [pair for group in groups for pair in zip(group, group[1:] + group[:1], strict=True)]
            messages = [(pair, part_bytes) for pair in rings]
        else:
            raise ValueError(f"{operation.name}: {operation.collective} is not counted")
        for (source, target), size_bytes in messages:
            sent[int(source // gpus_per_host != target // gpus_per_host), source] += size_bytes
    return Traffic(sent[0], sent[1], max(steps.values()), calls)
