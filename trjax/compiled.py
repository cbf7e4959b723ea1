"""From a lowered step to what was made of it: the program's operations, where its buffers lie, what is launched."""

import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trjax.hlo import parse_module
from trjax.operations import Operation, list_operations
from trjax.options import without_cache

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


@dataclass(frozen=True)
class Compiled:
    """A compiled step.

    Attributes:
        executable: what `lowered.compile()` returns, to run where the devices are here.
        text: the scheduled HLO.
        operations: in the order of issue.
        argument_bytes: device memory of the state and the batch.
        temp_bytes: device memory besides arguments and results.
        buffers: every value's place; empty where the compiler does not say.
        launches: kernels and collectives that the host starts, those inside of CUDA graphs left out; 0 if not known.
        graph_launches: those inside of CUDA graphs.
        graphs: CUDA graphs.
    """

    executable: Any
    text: str
    operations: tuple[Operation, ...]
    argument_bytes: int
    temp_bytes: int
    buffers: tuple[Buffer, ...]
    launches: int = 0
    graph_launches: int = 0
    graphs: int = 0


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


def _largest(files: Sequence[Path]) -> Path:
    """Returns the step's own dump: on a GPU, autotuning compiles small programs of its own."""
    return max(files, key=lambda path: path.stat().st_size)


def compile_lowered(lowered: Any) -> Compiled:
    """Compiles a lowered step with the options that it was jitted with, and reads what came out.

    Args:
        lowered: from `jax.jit(...).lower(...)`, `compilation.lower_step` for trjax's own.
    """
    with tempfile.TemporaryDirectory() as folder, without_cache():
        compiled = lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        files = [path for path in Path(folder).iterdir() if path.suffix == ".txt"]
        assignment = [path for path in files if path.name.endswith("buffer-assignment.txt")]
        thunks = [path for path in files if path.name.endswith("thunk_sequence_after_thunk_passes.txt")]
        buffers = parse_buffers(_largest(assignment).read_text().splitlines()) if assignment else ()
        launches = count_launches(_largest(thunks).read_text().splitlines()) if thunks else (0, 0, 0)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    operations = list_operations(parse_module(text))
    argument_bytes, temp_bytes = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    return Compiled(compiled, text, operations, argument_bytes, temp_bytes, buffers, *launches)
