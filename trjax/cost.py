"""Seconds from bytes, FLOPs and links: what the plan and the timeline predict with. No devices, no JAX.

A kernel takes the longer of its memory traffic and its arithmetic, and a launch (the roofline model). An AllReduce
takes what its algorithm does (`algorithms`, the a-B model), and a call. Peak rates are scaled to what tuned code
reaches; what compute and communication take from each other on one GPU is left out.

Source: Williams et al., "Roofline", 2009.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from trjax.algorithms import (
    Cost,
    Link,
    predict_double_tree,
    predict_hierarchical,
    predict_parameter_server,
    predict_ring,
    predict_tree,
    predict_zero1,
    predict_zero3,
)
from trjax.targets import Target

MEMORY_EFFICIENCY = 0.835
"""Share of the peak memory rate that streaming kernels reach: 2.8 of 3.35 TB/s on H100."""
MATH_EFFICIENCY = 0.556
"""Share of the peak arithmetic rate that ResNet's convolutions reach: 550 of 989 TFLOP/s in bf16 on H100."""
NVLINK_EFFICIENCY = 0.78
"""Share of NVLink's rate that NCCL's large AllReduces reach: 350 of 450 GB/s on H100."""
NETWORK_EFFICIENCY = 0.8
"""The same for the network: 40 of 50 GB/s."""
LAUNCH_SECONDS = 2e-6
"""From one kernel to the next on a GPU, launched by a stream."""
_MAX_WORLD_SIZE = 16_384  # larger meshes take minutes to make
CALL_SECONDS = 10e-6
"""Fixed cost of a NCCL call."""
NVLINK_LATENCY_SECONDS, NETWORK_LATENCY_SECONDS = 1e-6, 5e-6
"""Of one message, assumed: published figures differ with protocol and switch."""


@dataclass(frozen=True)
class Topology:
    """Equal hosts of equal GPUs."""

    hosts: int
    gpus_per_host: int

    @property
    def world_size(self) -> int:
        """GPUs in all."""
        return self.hosts * self.gpus_per_host


@dataclass(frozen=True)
class Machine:
    """What a step runs on.

    Attributes:
        target: the GPU.
        topology: how many.
        nvlink: between the GPUs of a host.
        network: between hosts, for each GPU.
    """

    target: Target
    topology: Topology
    nvlink: Link
    network: Link


def parse_topology(text: str) -> Topology:
    """Returns the topology that HOSTSxGPUS names.

    >>> parse_topology("4x8").world_size
    32

    Raises:
        ValueError: malformed, not positive, or of more than 16,384 GPUs.
    """
    match = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text.strip())
    if match is None:
        raise ValueError(f"topology={text!r}: write HOSTSxGPUS, both positive, 1x8 for instance")
    topology = Topology(int(match.group(1)), int(match.group(2)))
    if topology.world_size > _MAX_WORLD_SIZE:
        raise ValueError(f"topology={text!r}: {topology.world_size:,} GPUs are more than {_MAX_WORLD_SIZE:,}")
    return topology


def make_machine(target: Target, topology: Topology, link_gbytes: float = 0.0) -> Machine:
    """Returns the machine, with the target's own links at what NCCL reaches on them.

    Args:
        target: the GPU.
        topology: hosts and GPUs.
        link_gbytes: GB/s that the slowest link reaches, in place of the data sheet's: that between hosts, or
            NVLink with one host. 0 keeps the data sheet's.
    """
    nvlink = Link(target.nvlink_bytes_per_second, NVLINK_LATENCY_SECONDS, NVLINK_EFFICIENCY)
    network = Link(target.network_bytes_per_second, NETWORK_LATENCY_SECONDS, NETWORK_EFFICIENCY)
    if link_gbytes and topology.hosts > 1:
        network = Link(link_gbytes * 1e9, NETWORK_LATENCY_SECONDS)
    elif link_gbytes:
        nvlink = Link(link_gbytes * 1e9, NVLINK_LATENCY_SECONDS)
    return Machine(target, topology, nvlink, network)


def flat_link(machine: Machine, channels: int = 1) -> Link:
    """Returns the link of an algorithm that knows no hosts: the slowest on its way sets the pace of every step.

    Args:
        machine: hosts and links.
        channels: copies of the ring or tree, each of which leaves a host over the link of another GPU.
    """
    if machine.topology.hosts == 1:
        return machine.nvlink
    network = replace(machine.network, channels=channels)
    rate = min(machine.nvlink.reached_bytes_per_second, network.reached_bytes_per_second)
    return Link(rate, max(machine.nvlink.latency_seconds, machine.network.latency_seconds))


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


def predict_kernel(size_bytes: float, flops: float, dtype: str, target: Target) -> float:
    """Returns the seconds of one kernel on a GPU, its launch included.

    Args:
        size_bytes: read and written in device memory.
        flops: multiplications and additions of convolutions and matrix products; others are not counted.
        dtype: of the operands, which sets the rate: bf16, f16, f32 (cuDNN may take the faster TF32).
        target: the GPU.
    """
    memory = size_bytes / (target.memory_bytes_per_second * MEMORY_EFFICIENCY)
    rate = target.flops_per_second.get(dtype, target.flops_per_second["f32"])
    return LAUNCH_SECONDS + max(memory, flops / (rate * MATH_EFFICIENCY))
