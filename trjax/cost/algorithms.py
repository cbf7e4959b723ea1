"""What each way of summing over ranks costs: the bytes that a rank sends, its steps, its seconds. No devices, no JAX.

The a-B model: a message takes its latency, and its bytes at the link's rate; every rank sends and receives at once.
N ranks hold S bytes each, and all end with the sum. A single rank has nothing to send. What a call costs besides
its messages, and what communication takes from compute, is left out.

Sources: Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005 (ring, tree); Sanders et
al., "Two-Tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan", 2009; Li et al., "Scaling Distributed
Machine Learning with the Parameter Server", 2014; Rajbhandari et al., "ZeRO", 2020.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Link:
    """A link from a rank to its neighbour, one direction.

    Attributes:
        bytes_per_second: rate of one channel.
        latency_seconds: of one message.
        efficiency: share of the rate that is reached.
        channels: wires that share every message.
    """

    bytes_per_second: float
    latency_seconds: float
    efficiency: float = 1.0
    channels: int = 1

    @property
    def reached_bytes_per_second(self) -> float:
        """What all channels together reach.

        >>> Link(25e9, 0.0, efficiency=0.9, channels=8).reached_bytes_per_second
        180000000000.0
        """
        return self.channels * self.bytes_per_second * self.efficiency


@dataclass(frozen=True)
class Cost:
    """What one sum over all ranks costs.

    Attributes:
        bytes_per_rank: the most that a rank sends.
        steps: messages that wait for each other, from first to last.
        seconds: of all steps.
        calls: collectives that it is made of.
        root_bytes: sent by a server that is none of the ranks.
    """

    bytes_per_rank: float
    steps: int
    seconds: float
    calls: int = 1
    root_bytes: float = 0.0


Algorithm = Callable[[float, int, Link], Cost]
"""From the bytes on each rank, the number of ranks and their link to the cost."""


def _in_turn(*phases: Cost) -> Cost:
    """Returns the cost of phases that wait for each other, as one call."""
    return Cost(
        sum(phase.bytes_per_rank for phase in phases),
        sum(phase.steps for phase in phases),
        sum(phase.seconds for phase in phases),
    )


def _count_levels(world_size: int) -> int:
    """Returns the edges from the root of a binary tree to its farthest leaf: log2 N, rounded up."""
    return (world_size - 1).bit_length()


def predict_parameter_server(size_bytes: float, world_size: int, link: Link) -> Cost:
    """Returns the cost of a server that is none of the ranks: all send to it, it sends the sum to all.

    Its own link carries N S bytes in and as many out. (A root among the ranks would carry N - 1 times S.)

    >>> predict_parameter_server(100.0, 4, Link(10.0, 1.0))
    Cost(bytes_per_rank=100.0, steps=2, seconds=82.0, calls=1, root_bytes=400.0)
    """
    if world_size == 1:
        return Cost(0.0, 0, 0.0)
    root_bytes = world_size * size_bytes
    seconds = 2 * (link.latency_seconds + root_bytes / link.reached_bytes_per_second)
    return Cost(size_bytes, 2, seconds, root_bytes=root_bytes)


def predict_reduce_scatter(size_bytes: float, world_size: int, link: Link) -> Cost:
    """Returns the cost of a ring that leaves each rank with its part of the sum: N - 1 messages of S/N.

    >>> predict_reduce_scatter(8.0, 4, Link(1.0, 0.5))
    Cost(bytes_per_rank=6.0, steps=3, seconds=7.5, calls=1, root_bytes=0.0)
    """
    steps = world_size - 1
    seconds = steps * (link.latency_seconds + size_bytes / (world_size * link.reached_bytes_per_second))
    return Cost(steps * size_bytes / world_size, steps, seconds)


def predict_all_gather(size_bytes: float, world_size: int, link: Link) -> Cost:
    """Returns the cost of a ring that brings all parts to every rank: the reduce-scatter, backwards.

    Args:
        size_bytes: of the gathered whole.
        world_size: ranks.
        link: to the neighbour.
    """
    return predict_reduce_scatter(size_bytes, world_size, link)


def predict_ring(size_bytes: float, world_size: int, link: Link) -> Cost:
    """Returns the cost of an AllReduce as reduce-scatter and all-gather: 2 (N-1) messages of S/N.

    >>> found = predict_ring(2**30, 8, Link(25 * 2**30, 0.0))
    >>> found.bytes_per_rank / 2**30, found.steps, round(found.seconds * 1e3, 9)
    (1.75, 14, 70.0)
    """
    return _in_turn(
        predict_reduce_scatter(size_bytes, world_size, link), predict_all_gather(size_bytes, world_size, link)
    )


def predict_tree(size_bytes: float, world_size: int, link: Link) -> Cost:
    """Returns the cost of one binary tree, reduced up and broadcast down, each level after the other with all bytes.

    An inner rank sends S up and S down to each of two children; with less than five ranks none has so many
    neighbours.

    >>> predict_tree(10.0, 8, Link(5.0, 1.0))
    Cost(bytes_per_rank=30.0, steps=6, seconds=18.0, calls=1, root_bytes=0.0)
    """
    levels = _count_levels(world_size)
    seconds = 2 * levels * (link.latency_seconds + size_bytes / link.reached_bytes_per_second)
    return Cost(min(3, levels) * size_bytes, 2 * levels, seconds)


def predict_double_tree(size_bytes: float, world_size: int, link: Link) -> Cost:
    """Returns the cost of two pipelined binary trees, half of the bytes on each.

    A rank is inner in one tree and a leaf, which sends its half once, in the other. Chunks follow each other so
    closely that the levels cost their latency alone.

    >>> predict_double_tree(10.0, 8, Link(5.0, 1.0))
    Cost(bytes_per_rank=20.0, steps=6, seconds=10.0, calls=1, root_bytes=0.0)
    """
    if world_size == 1:
        return Cost(0.0, 0, 0.0)
    tree = predict_tree(size_bytes / 2, world_size, link)
    seconds = tree.steps * link.latency_seconds + 2 * size_bytes / link.reached_bytes_per_second
    return Cost(tree.bytes_per_rank + size_bytes / 2, tree.steps, seconds)


def predict_hierarchical(
    size_bytes: float, hosts: int, gpus_per_host: int, nvlink: Link, network: Link, across: Algorithm = predict_ring
) -> Cost:
    """Returns the cost of reduce-scatter in the host, AllReduce of each GPU's part over the hosts, all-gather.

    Args:
        size_bytes: on each GPU.
        hosts: equal ones.
        gpus_per_host: each with a network link of its own.
        nvlink: in the host.
        network: between hosts, for each GPU.
        across: how the hosts sum.

    >>> predict_hierarchical(8.0, 2, 4, Link(1.0, 0.0), Link(0.5, 0.0))
    Cost(bytes_per_rank=14.0, steps=8, seconds=16.0, calls=1, root_bytes=0.0)
    """
    return _in_turn(
        predict_reduce_scatter(size_bytes, gpus_per_host, nvlink),
        predict_all_gather(size_bytes, gpus_per_host, nvlink),
        across(size_bytes / gpus_per_host, hosts, network),
    )


def predict_zero1(size_bytes: float, world_size: int, link: Link) -> Cost:
    """Returns the cost of ZeRO-1 and ZeRO-2: gradients reduce-scattered, then updated parameters all-gathered.

    The ring's bytes and steps; but a call of its own before the update, and one behind it.
    """
    return replace(predict_ring(size_bytes, world_size, link), calls=2)


def predict_zero3(size_bytes: float, world_size: int, link: Link) -> Cost:
    """Returns the cost of ZeRO-3 and FSDP: parameters all-gathered in forward and backward, gradients reduce-scattered.

    >>> predict_zero3(8.0, 4, Link(1.0, 0.5))
    Cost(bytes_per_rank=18.0, steps=9, seconds=22.5, calls=3, root_bytes=0.0)
    """
    gather = predict_all_gather(size_bytes, world_size, link)
    return replace(_in_turn(gather, gather, predict_reduce_scatter(size_bytes, world_size, link)), calls=3)
