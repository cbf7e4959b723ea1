"""Compile options that the compiler of a mesh knows: options come and go between versions of XLA."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
from jax.sharding import Mesh

from trjax.mesh import REPLICATED, placement
from trjax.xla.cache import without_cache

CompileOptions = dict[str, Any]
"""Names and values, as `jax.jit(compiler_options=...)` takes them."""


@dataclass(frozen=True)
class CompilerOptions:
    """Options for a compiler.

    Attributes:
        accepted: options and values, for `jax.jit`.
        dropped: options that this version of the compiler does not know.
    """

    accepted: CompileOptions
    dropped: tuple[str, ...]


@cache
def find_known_options(mesh: Mesh, wanted: tuple[tuple[str, bool | int | str], ...]) -> CompilerOptions:
    """Returns the options that a mesh's compiler knows, found by compiling an empty program.

    Args:
        mesh: the devices; those of a topology description will do.
        wanted: names and values to try. XLA fails at the first name that it does not know.

    Raises:
        jax.errors.JaxRuntimeError: the compiler fails for another reason.
    """
    accepted: CompileOptions = dict(wanted)
    dropped: list[str] = []
    empty = jax.jit(lambda x: x, in_shardings=placement(mesh, REPLICATED)).lower(jax.ShapeDtypeStruct((), "float32"))
    while True:
        try:
            with without_cache():
                empty.compile(accepted)
        except jax.errors.JaxRuntimeError as error:
            unknown = re.search(r"(?:No such compile option: '|setting option )(\w+)", str(error))
            if unknown is None or unknown.group(1) not in accepted:
                raise
            dropped.append(unknown.group(1))
            del accepted[dropped[-1]]
        else:
            return CompilerOptions(accepted, tuple(dropped))
