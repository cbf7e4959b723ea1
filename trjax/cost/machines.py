"""GPUs, how many, and the links between them."""

import re
from dataclasses import dataclass, replace

from trjax.cost.algorithms import (
    Link,
)
from trjax.cost.targets import Target

NVLINK_EFFICIENCY = 0.78
"""Share of NVLink's rate that NCCL's large AllReduces reach: 350 of 450 GB/s on H100."""
NETWORK_EFFICIENCY = 0.8
"""The same for the network: 40 of 50 GB/s."""
_MAX_WORLD_SIZE = 16_384  # larger meshes take minutes to make
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
