"""Seconds from bytes, FLOPs and links: what the plan and the timeline predict with. No devices, no JAX.

A kernel takes the longer of its memory traffic and its arithmetic, and a launch (the roofline model). An AllReduce
takes a latency for every message and the transfer of its bytes (the a-B model). Peak rates are scaled to what
tuned code reaches; what compute and communication take from each other on one GPU is left out.

Sources: Williams et al., "Roofline", 2009; Thakur et al., "Optimization of Collective Communication Operations in
MPICH", 2005 (ring); Sanders et al., "Two-Tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan", 2009.
"""

import math
import re
from dataclasses import dataclass

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
class Link:
    """A link between two neighbours: one direction's rate, and the latency of a message."""

    bytes_per_second: float
    latency_seconds: float


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
    nvlink = target.nvlink_bytes_per_second * NVLINK_EFFICIENCY
    network = target.network_bytes_per_second * NETWORK_EFFICIENCY
    if link_gbytes and topology.hosts > 1:
        network = link_gbytes * 1e9
    elif link_gbytes:
        nvlink = link_gbytes * 1e9
    return Machine(target, topology, Link(nvlink, NVLINK_LATENCY_SECONDS), Link(network, NETWORK_LATENCY_SECONDS))


def predict_ring(size_bytes: float, world_size: int, link: Link) -> float:
    """Returns the seconds of a ring AllReduce: 2 (N-1) messages of 1/N of the data.

    >>> round(predict_ring(2**30, 8, Link(25 * 2**30, 0.0)) * 1e3, 6)
    70.0
    """
    return 2 * (world_size - 1) * (link.latency_seconds + size_bytes / (world_size * link.bytes_per_second))


def predict_tree(size_bytes: float, world_size: int, link: Link) -> float:
    """Returns the seconds of a pipelined double binary tree: two trees, half of the data on each."""
    if world_size == 1:
        return 0.0
    return 2 * math.ceil(math.log2(world_size)) * link.latency_seconds + 2 * size_bytes / link.bytes_per_second


def predict_all_reduce(size_bytes: float, machine: Machine) -> float:
    """Returns the seconds of one AllReduce over all GPUs.

    Inside a host a ring over NVLink. Between hosts each GPU reduces its share with those of the other hosts, by
    ring or tree, whichever is faster: reduce-scatter in the host, AllReduce across, all-gather in the host.
    """
    hosts, local = machine.topology.hosts, machine.topology.gpus_per_host
    if hosts * local == 1:
        return 0.0
    inside = predict_ring(size_bytes, local, machine.nvlink)
    share = size_bytes / local
    across = min(predict_ring(share, hosts, machine.network), predict_tree(share, hosts, machine.network))
    return CALL_SECONDS + inside + across


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
