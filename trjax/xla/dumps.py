"""XLA's dumps: where buffers lie, what is launched."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_ALLOCATION = re.compile(r"allocation (\d+):")
_VALUE = re.compile(r"\s*value: <\d+ (\S+) @\d+> \(size=(\d+),offset=(\d+)\)")
_THUNK = re.compile(r"( *)\d+: (k\w+)")
_NOT_LAUNCHED = ("kCommandBuffer", "kAsyncStart", "kAsyncDone", "kSequential")


@dataclass(frozen=True)
class Buffer:
    """Where the compiler put a value.

    Attributes:
        name: of the instruction that makes it, with the index of its part in braces.
        allocation: number of the allocation.
        offset_bytes: from its start.
        size_bytes: that the value takes.
    """

    name: str
    allocation: int
    offset_bytes: int
    size_bytes: int


def parse_buffers(lines: Iterable[str]) -> tuple[Buffer, ...]:
    """Reads XLA's dump of a buffer assignment.

    >>> parse_buffers(["allocation 3: size 64, color 1:", " value: <9 sum.1 @1> (size=16,offset=32): f32[4]{0}"])
    (Buffer(name='sum.1', allocation=3, offset_bytes=32, size_bytes=16),)
    """
    buffers, allocation = [], -1
    for line in lines:
        if header := _ALLOCATION.match(line):
            allocation = int(header.group(1))
        elif value := _VALUE.match(line):
            name, size, offset = value.groups()
            buffers.append(Buffer(name, allocation, int(offset), int(size)))
    return tuple(buffers)


def count_launches(lines: Iterable[str]) -> tuple[int, int, int]:
    """Reads XLA's dump of a thunk sequence: launches outside of CUDA graphs, inside of them, and CUDA graphs.

    >>> count_launches(["000: kCommandBuffer", "    001: kCustomKernel", "002: kConvolution"])
    (1, 1, 1)
    """
    outside, inside, graphs, graph_depth = 0, 0, 0, -1
    for line in lines:
        match = _THUNK.match(line)
        if match is None:
            continue
        depth, kind = len(match.group(1)), match.group(2)
        graph_depth = graph_depth if depth > graph_depth else -1
        if kind == "kCommandBuffer":
            graphs, graph_depth = graphs + 1, depth
        elif kind not in _NOT_LAUNCHED:
            inside, outside = inside + (graph_depth >= 0), outside + (graph_depth < 0)
    return outside, inside, graphs
