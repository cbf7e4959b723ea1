"""From a lowered step to what was made of it: the program's operations, where its buffers lie, what is launched."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trjax.xla.cache import without_cache
from trjax.xla.dumps import Buffer, count_launches, parse_buffers
from trjax.xla.hlo import parse_module
from trjax.xla.operations import Operation, list_operations


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


def _largest(files: Sequence[Path]) -> Path:
    """Returns the step's own dump: on a GPU, autotuning compiles small programs of its own."""
    return max(files, key=lambda path: path.stat().st_size)


def compile_lowered(lowered: Any) -> Compiled:
    """Compiles a lowered step with the options that it was jitted with, and reads what came out.

    Args:
        lowered: from `jax.jit(...).lower(...)`.
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
