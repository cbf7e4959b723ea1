"""The ways of summing gradients, `--reducer`: which of them travel together, how, and what that should compile to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from trjax.config.run import Config
from trjax.cost.machines import Topology
from trjax.step import collectives
from trjax.step.buckets import ITEM_BYTES, MIB_BYTES, Grouping, ddp_buckets, one_each, one_group, two_groups
from trjax.step.collectives import Launch
from trjax.step.plan import Group

Call = tuple[str, int]
"""A collective that the program should hold: its opcode, and the bytes that each device hands in."""


@dataclass(frozen=True)
class Reducer:
    """One way of summing gradients.

    Attributes:
        split: which gradients form a group.
        launch: sums a group, to the whole on every device or to this device's shard of it.
        calls: collectives of one group on a topology; what has one participant is none.
        sharded: `launch` gives shards, whose owner updates them.
        ordinary: as programs are usually written: results and statistics by themselves, in no order, and with the
            compiler's own options.
        written_out: the same bits on all devices, which `shard_map` cannot see.
    """

    split: Grouping
    launch: Launch
    calls: Callable[[Group, Topology], Sequence[Call]]
    sharded: bool = False
    ordinary: bool = False
    written_out: bool = False


def _one_call(group: Group, _topology: Topology) -> list[Call]:
    return [("all-reduce", group.size_bytes)]


def _part_bytes(group: Group, parts: int) -> int:
    """Returns the bytes of one of equal parts of a group, padding included."""
    return group.itemsize_bytes * -(-group.size_elements // parts)


def _ring_calls(group: Group, topology: Topology) -> list[Call]:
    world_size = topology.world_size
    return [("collective-permute", _part_bytes(group, world_size))] * (2 * (world_size - 1))


def _hierarchical_calls(group: Group, topology: Topology) -> list[Call]:
    local, shard_bytes = topology.gpus_per_host, _part_bytes(group, topology.gpus_per_host)
    across = [("all-reduce", shard_bytes)] if topology.hosts > 1 else []
    if local == 1:
        return across
    return [("reduce-scatter", local * shard_bytes), *across, ("all-gather", shard_bytes)]


def _shard_calls(group: Group, topology: Topology) -> list[Call]:
    """The new parameters are gathered in float32, whatever the gradients are summed in."""
    gathered_bytes = ITEM_BYTES * group.size_elements // topology.world_size
    return [("reduce-scatter", group.size_bytes), ("all-gather", gathered_bytes)]


def make_reducer(config: Config) -> Reducer:
    """Returns the configured reducer; `auto` starts from the two groups."""
    bucket_bytes = int(config.bucket_mb * MIB_BYTES)
    whole = partial(Reducer, launch=collectives.all_reduce, calls=_one_call)
    reducers = {
        "two_group": whole(two_groups),
        "auto": whole(two_groups),
        "single": whole(one_group),
        "per_leaf": Reducer(one_each, collectives.all_reduce_untied, _one_call, ordinary=True),
        "ddp": whole(partial(ddp_buckets, bucket_bytes, True)),
        "ddp_initial": whole(partial(ddp_buckets, bucket_bytes, False)),
        "ring": Reducer(two_groups, collectives.ring, _ring_calls, written_out=True),
        "hierarchical": Reducer(two_groups, collectives.hierarchical, _hierarchical_calls),
        "zero1": Reducer(two_groups, collectives.reduce_scatter, _shard_calls, sharded=True),
    }
    return reducers[config.reducer]
