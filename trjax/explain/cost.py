"""`python -m trjax.explain cost`: what each way to sum over ranks takes, and where each wins. It needs no JAX."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated

from pydantic import Field

from trjax.commands import read_options
from trjax.config.checks import Checked
from trjax.config.fields import rule
from trjax.cost.algorithms import Cost
from trjax.cost.collectives import CALL_SECONDS, predict_algorithms, predict_efficiency, predict_speedup
from trjax.cost.machines import (
    NETWORK_LATENCY_SECONDS,
    NVLINK_LATENCY_SECONDS,
    Machine,
    Topology,
    flat_link,
    make_machine,
)
from trjax.cost.targets import find_target
from trjax.text import format_table

_LAST_RANKS = 4096  # of the tables over ranks
_Rate = Annotated[float | None, Field(ge=1e-6, le=1e6)]
_Microseconds = Annotated[float, Field(ge=0, le=1e6)]


@dataclass(frozen=True)
class CostOptions(Checked):
    """Print what each way to sum over ranks takes, and where each wins."""

    bytes: Annotated[float, Field(ge=1, le=1e15)] = 102_440_624
    """Bytes that each rank holds and wants summed; by default ResNet-50's gradients in float32."""
    ranks: Annotated[int, Field(ge=1, le=2**20), rule(lambda ranks: ranks > 1, "one rank has nothing to sum")] = 64
    """GPUs in all."""
    gpus_per_host: Annotated[int, Field(ge=1, le=1024)] = 8
    """GPUs of each host; no more ranks than this are one host."""
    target: str = "h100"
    """GPU whose data sheet gives the rates left out below: a100, h100, h200 or b200."""
    link_gbytes: _Rate = None
    """GB/s, one direction, of the slowest link: of each GPU's to other hosts, or with one host of NVLink."""
    nvlink_gbytes: _Rate = None
    """GB/s, one direction, of each GPU's link in the host."""
    efficiency: Annotated[float | None, Field(ge=1e-3, le=1)] = None
    """Share of the slowest link's rate that is reached; by default 1 for a given rate, 0.8 of a data sheet's."""
    channels: Annotated[int, Field(ge=1, le=1024)] = 1
    """Rings or trees in parallel, each of which leaves a host over another GPU's link; hierarchical uses all links."""
    latency_us: _Microseconds = NETWORK_LATENCY_SECONDS * 1e6
    """Microseconds of a message between hosts."""
    nvlink_latency_us: _Microseconds = NVLINK_LATENCY_SECONDS * 1e6
    """Microseconds of a message in the host."""
    call_us: _Microseconds = CALL_SECONDS * 1e6
    """Microseconds of a collective, whatever it sends."""
    compute_ms: Annotated[float | None, Field(ge=1e-3, le=1e9)] = None
    """Milliseconds of a step without communication: adds the efficiency of scaling to 4096 ranks."""
    hidden_ms: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Milliseconds of communication that are overlapped with computing in each step."""

    def check_rules(self) -> None:
        """Raises ValueError if options do not fit each other."""
        below = self.ranks // self.gpus_per_host * self.gpus_per_host
        if below not in (0, self.ranks):
            raise ValueError(
                f"ranks={self.ranks} is not divisible by gpus_per_host={self.gpus_per_host}; "
                f"nearest valid: {below}, {below + self.gpus_per_host}"
            )
        if self.channels > (most := min(self.gpus_per_host, self.ranks)):
            raise self.conflict("channels", why=f"must be from 1 to {most}")
        if self.hidden_ms > (self.compute_ms or 0.0):
            raise self.conflict("hidden_ms", "compute_ms", why="must be at most compute_ms; pass --compute-ms")


def _topology(ranks: int, gpus_per_host: int) -> Topology:
    local = min(ranks, gpus_per_host)
    return Topology(ranks // local, local)


def _machine(options: CostOptions) -> Machine:
    topology = _topology(options.ranks, options.gpus_per_host)
    machine = make_machine(find_target(options.target), topology, options.link_gbytes or 0.0)
    network, nvlink = machine.network, machine.nvlink
    if options.nvlink_gbytes is not None:
        nvlink = replace(nvlink, bytes_per_second=options.nvlink_gbytes * 1e9, efficiency=1.0)
    if options.efficiency is not None and topology.hosts > 1:
        network = replace(network, efficiency=options.efficiency)
    elif options.efficiency is not None:
        nvlink = replace(nvlink, efficiency=options.efficiency)
    nvlink = replace(nvlink, latency_seconds=options.nvlink_latency_us / 1e6)
    return replace(machine, nvlink=nvlink, network=replace(network, latency_seconds=options.latency_us / 1e6))


def _all_reduces(size_bytes: float, machine: Machine, channels: int) -> dict[str, Cost]:
    """Returns the costs of what is one call: ZeRO's several do not return the whole sum to every rank."""
    found = predict_algorithms(size_bytes, machine, channels)
    return {name: cost for name, cost in found.items() if cost.calls == 1}


def find_crossovers(lines: Mapping[str, tuple[float, float]]) -> list[tuple[float, str]]:
    """Returns from which size on which name takes least, by rising size, beginning with 0.

    Args:
        lines: by name, the seconds of no byte, and those of each byte more; the first of equal ones wins.

    >>> find_crossovers({"early": (1.0, 3.0), "never": (4.0, 3.0), "late": (5.0, 1.0)})
    [(0.0, 'early'), (2.0, 'late')]
    """
    start, name = 0.0, min(lines, key=lambda other: lines[other])
    found = [(start, name)]
    while True:
        base, slope = lines[name]
        flatter = [
            ((other_base - base) / (slope - other_slope), other_slope, other)
            for other, (other_base, other_slope) in lines.items()
            if other_slope < slope
        ]
        if not flatter:
            return found
        start, _, name = min(flatter, key=lambda meeting: meeting[:2])
        found.append((start, name))


def _size_ranges(machine: Machine, channels: int) -> dict[str, str]:
    """Returns for each algorithm the message sizes at which it is the fastest."""
    links = {name: replace(getattr(machine, name), latency_seconds=0.0) for name in ("nvlink", "network")}
    at_once = replace(machine, **links)
    bases, slopes = _all_reduces(0.0, machine, channels), _all_reduces(1.0, at_once, channels)
    found = find_crossovers({name: (bases[name].seconds, slopes[name].seconds) for name in bases})
    ranges = dict.fromkeys(bases, "-")
    for (start, name), (end, _) in zip(found, [*found[1:], (0.0, "")], strict=True):
        if not end:
            ranges[name] = f"from {format_bytes(start)}" if start else "all"
        else:
            ranges[name] = f"{format_bytes(start)} to {format_bytes(end)}" if start else f"to {format_bytes(end)}"
    return ranges


def _world_sizes(options: CostOptions) -> list[int]:
    """Returns powers of two that fit a host, then doubled hosts, and the ranks asked for."""
    last, local = max(_LAST_RANKS, options.ranks), options.gpus_per_host
    inside = [2**power for power in range(1, local.bit_length()) if 2**power <= local]
    across = [local * 2**power for power in range(last.bit_length()) if local * 2**power <= last]
    return sorted({*inside, *across, options.ranks} - {1})


def _fastest(machine: Machine, ranks: int, options: CostOptions) -> tuple[str, float]:
    """Returns the fastest AllReduce of so many ranks, and its seconds."""
    machine = replace(machine, topology=_topology(ranks, options.gpus_per_host))
    found = _all_reduces(options.bytes, machine, options.channels)
    name = min(found, key=lambda other: found[other].seconds)
    return name, found[name].seconds


def _rank_ranges(machine: Machine, options: CostOptions, names: Iterable[str]) -> dict[str, str]:
    """Returns for each algorithm the numbers of ranks at which it is the fastest."""
    ranges: dict[str, list[str]] = {name: [] for name in names}
    for name, run in groupby(_world_sizes(options), lambda ranks: _fastest(machine, ranks, options)[0]):
        first, *rest = run
        ranges[name].append(f"{first} to {rest[-1]}" if rest else f"{first}")
    return {name: ", ".join(runs) or "-" for name, runs in ranges.items()}


def format_bytes(size_bytes: float) -> str:
    """Returns bytes with three digits and a decimal unit.

    >>> format_bytes(1.2e9), format_bytes(34_120), format_bytes(7.0)
    ('1.2 GB', '34.1 kB', '7 bytes')
    """
    for unit, factor in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= factor:
            return f"{float(f'{size_bytes / factor:.3g}'):g} {unit}"
    return f"{size_bytes:.3g} bytes"


def _format_costs(found: Mapping[str, Cost], call_seconds: float) -> str:
    rows = []
    for name, cost in found.items():
        seconds = cost.seconds + cost.calls * call_seconds
        rows.append([name, f"{cost.bytes_per_rank:,.0f}", f"{cost.steps:,}", cost.calls, f"{seconds * 1e3:,.3f}"])
    return format_table(["algorithm", "bytes a rank", "steps", "calls", "ms"], rows)


def _format_scaling(machine: Machine, options: CostOptions, compute_seconds: float) -> str:
    """Returns the efficiency of a step at every number of ranks, with the fastest AllReduce at each."""
    rows = [["1", "-", "0.000", "0.000", "100.0%", "1.0"]]
    for ranks in _world_sizes(options):
        name, seconds = _fastest(machine, ranks, options)
        seconds += options.call_us / 1e6
        exposed = max(0.0, seconds - options.hidden_ms / 1e3)
        milliseconds = [f"{each * 1e3:,.3f}" for each in (seconds, exposed)]
        share = predict_efficiency(compute_seconds, exposed)
        speedup = predict_speedup(ranks, compute_seconds, exposed)
        rows.append([f"{ranks}", name, *milliseconds, f"{share:.1%}", f"{speedup:,.1f}"])
    return format_table(["ranks", "fastest", "ms", "exposed ms", "efficiency", "does the work of"], rows)


def describe_costs(arguments: Sequence[str]) -> str:
    """Returns the text of the command: the costs of all algorithms, where each is the fastest, and how a step scales.

    Raises:
        ValueError: an option is out of its range.
        SystemExit: an unknown option or a value of the wrong type (2), or `--help` (0).
    """
    options = read_options("python -m trjax.explain cost", CostOptions, arguments)
    machine = _machine(options)
    topology, links = machine.topology, (machine.nvlink, machine.network, flat_link(machine, options.channels))
    nvlink, network, slowest = (link.reached_bytes_per_second / 1e9 for link in links)
    title = (
        f"{format_bytes(options.bytes)} on each of {options.ranks} ranks, {topology.hosts}x{topology.gpus_per_host}: "
        f"{nvlink:.6g} GB/s and {options.nvlink_latency_us:g} us a message in a host, "
        f"{network:.6g} GB/s a GPU and {options.latency_us:g} us between hosts, {options.call_us:g} us a call"
    )
    found = predict_algorithms(options.bytes, machine, options.channels)
    sizes, ranks = _size_ranges(machine, options.channels), _rank_ranges(machine, options, found)
    rows = [[name, sizes[name], ranks[name]] for name in sizes]
    header = ["fastest AllReduce", f"bytes, {options.ranks} ranks", f"ranks, {format_bytes(options.bytes)}"]
    notes = [
        f"hierarchical uses the links of all GPUs; ways that know no hosts go at {slowest:.6g} GB/s",
        f"the parameter server itself sends {found['parameter server'].root_bytes:,.0f} bytes",
        "ZeRO's ways save memory: they leave each rank a part of the sum",
    ]
    parts = [title, _format_costs(found, options.call_us / 1e6), "\n".join(notes), format_table(header, rows)]
    if options.compute_ms is not None:
        parts.append(_format_scaling(machine, options, options.compute_ms / 1e3))
    parts.append("predicted by the a-B model: NCCL chooses for itself, and what it takes from compute is left out")
    return "\n\n".join(parts)


def main(arguments: Sequence[str]) -> int:
    """Prints what each way to sum takes, and returns the exit code."""
    print(describe_costs(arguments))
    return 0
