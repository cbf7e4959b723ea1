"""Seconds from bytes, FLOPs and links: what the plan and the timeline predict with. No devices, no JAX.

A kernel takes the longer of its memory traffic and its arithmetic, and a launch (the roofline model). An AllReduce
takes what its algorithm does (`algorithms`, the a-B model), and a call. Peak rates are scaled to what tuned code
reaches; what compute and communication take from each other on one GPU is left out.

Source: Williams et al., "Roofline", 2009.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from trjax.cost.algorithms import (
    Cost,
    predict_double_tree,
    predict_hierarchical,
    predict_parameter_server,
    predict_ring,
    predict_tree,
    predict_zero1,
    predict_zero3,
)
from trjax.cost.machines import Machine, Topology, flat_link

CALL_SECONDS = 10e-6
"""Fixed cost of a NCCL call."""


def predict_algorithms(size_bytes: float, machine: Machine, channels: int = 1) -> dict[str, Cost]:
    """Returns the cost of every way to sum gradients over all GPUs, by its name.

    The last two do not return the whole sum to every GPU: they save memory.

    Args:
        size_bytes: on each GPU.
        machine: what it runs on.
        channels: of the algorithms that know no hosts, see `flat_link`.
    """
    hosts, local, world_size = machine.topology.hosts, machine.topology.gpus_per_host, machine.topology.world_size
    flat = flat_link(machine, channels)
    by_hosts = partial(predict_hierarchical, size_bytes, hosts, local, machine.nvlink, machine.network)
    return {
        "parameter server": predict_parameter_server(size_bytes, world_size, flat),
        "ring": predict_ring(size_bytes, world_size, flat),
        "binary tree": predict_tree(size_bytes, world_size, flat),
        "double binary tree": predict_double_tree(size_bytes, world_size, flat),
        "hierarchical, rings": by_hosts(),
        "hierarchical, trees": by_hosts(across=predict_double_tree),
        "ZeRO-1, ZeRO-2": predict_zero1(size_bytes, world_size, flat),
        "ZeRO-3, FSDP": predict_zero3(size_bytes, world_size, flat),
    }


def predict_all_reduce(size_bytes: float, machine: Machine) -> float:
    """Returns the seconds of one AllReduce over all GPUs.

    Inside a host a ring over NVLink. Between hosts each GPU reduces its share with those of the other hosts, by
    ring or tree, whichever is faster: reduce-scatter in the host, AllReduce across, all-gather in the host.
    """
    hosts, local = machine.topology.hosts, machine.topology.gpus_per_host
    if hosts * local == 1:
        return 0.0
    by_hosts = partial(predict_hierarchical, size_bytes, hosts, local, machine.nvlink, machine.network)
    return CALL_SECONDS + min(by_hosts(across=across).seconds for across in (predict_ring, predict_double_tree))


def _joined(groups: Sequence[Sequence[int]], machine: Machine) -> Topology:
    """Returns the hosts that the first of equal groups of devices reaches, and its devices on each."""
    if not groups:
        return machine.topology
    hosts = len({device // machine.topology.gpus_per_host for device in groups[0]})
    return Topology(hosts, len(groups[0]) // hosts)


def predict_collective(
    collective: str, size_bytes: float, machine: Machine, groups: Sequence[Sequence[int]] = ()
) -> float:
    """Returns the seconds of one collective.

    Args:
        collective: `all-reduce`; `reduce-scatter` and `all-gather`, half of one each; or `collective-permute`, a
            message of each device over the slowest link that one of them takes.
        size_bytes: that each device hands in.
        machine: what it runs on.
        groups: of devices that it joins, or the pairs of a permutation; empty: all devices.
    """
    if machine.topology.world_size == 1:
        return 0.0
    if collective == "collective-permute":
        local = machine.topology.gpus_per_host
        crosses = any(source // local != target // local for source, target in groups)
        link = machine.network if crosses else machine.nvlink
        return CALL_SECONDS + link.latency_seconds + size_bytes / link.reached_bytes_per_second
    joined = replace(machine, topology=_joined(groups, machine))
    if collective == "all-reduce":
        return predict_all_reduce(size_bytes, joined)
    whole_bytes = size_bytes * joined.topology.world_size if collective == "all-gather" else size_bytes
    return (CALL_SECONDS + predict_all_reduce(whole_bytes, joined)) / 2


def predict_efficiency(compute_seconds: float, exposed_seconds: float) -> float:
    """Returns a device's share of the throughput that it has alone, where nothing is exposed.

    >>> predict_efficiency(3.0, 1.0)
    0.75
    """
    return compute_seconds / (compute_seconds + exposed_seconds)


def predict_speedup(world_size: int, compute_seconds: float, exposed_seconds: float) -> float:
    """Returns how many single devices do as much: 256 whose steps take twice as long do the work of 128.

    >>> predict_speedup(256, 0.1, 0.1)
    128.0
    """
    return world_size * predict_efficiency(compute_seconds, exposed_seconds)
