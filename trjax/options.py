"""Compile options by platform: one place, probed once, the same for `trjax.train` and `trjax.explain`."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh

from trjax.config import Config
from trjax.mesh import REPLICATED, placement

Options = dict[str, Any]

USER_BUFFERS = "xla_gpu_enable_nccl_user_buffers"

_BY_PLATFORM: dict[str, Options] = {
    "cpu": {
        # Barriers are gone when the CPU's combiner runs, and it would merge the groups into one late AllReduce.
        "xla_disable_hlo_passes": "cpu-all-reduce-combiner",
        # YNNPACK's convolutions take twice as long as Eigen's, and those of filter gradients thirty times.
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
        # CPU devices share the cores and so arrive far apart when a step is long.
        "xla_cpu_collective_call_terminate_timeout_seconds": 600,
    },
    "gpu": {
        # The default on Hopper, not on Ampere: without it every collective blocks.
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # The scheduler works from the end of the program; these two let a group start where it is complete.
        "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
        "xla_gpu_experimental_collective_start_as_early_as_possible": True,
        # Groups are chosen by the plan; the combiner's threshold of 30 MiB would merge small ones.
        "xla_gpu_all_reduce_combine_threshold_bytes": 0,
        # All AllReduce buffers in one allocation of their own, which NCCL registers once.
        USER_BUFFERS: True,
        # XLA's defaults, and with them convolutions and collectives: the whole step replays as CUDA graphs.
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONVOLUTION,COLLECTIVES",
    },
}

DETERMINISTIC: dict[str, Options] = {
    # Every kernel whose result depends on the order in which threads add is refused or replaced, and none is chosen
    # by how long it took.
    "gpu": {
        "xla_gpu_deterministic_ops": True,
        "xla_gpu_exclude_nondeterministic_ops": True,
        "xla_gpu_autotune_level": 0,
    },
}
"""Options of `--deterministic`, beside those of the platform; the CPU needs none."""
_DETERMINISTIC_NCCL = ("NCCL_ALGO=Ring", "NCCL_PROTO=Simple")  # one order of sums, whatever the message and the load

INIT_OPTIONS: dict[str, Options] = {"cpu": {"xla_backend_optimization_level": 0}}
"""Options of the initialisation: it runs once, and optimising its random bits takes longer than drawing them."""


@dataclass(frozen=True)
class CompilerOptions:
    """What a platform's compiler is told.

    Attributes:
        accepted: options and values, for `jax.jit`.
        dropped: options that this version of the compiler does not know.
    """

    accepted: Options
    dropped: tuple[str, ...]


def nccl_settings(config: Config) -> tuple[str, ...]:
    """Returns the NAME=VALUE pairs for NCCL's environment; what the user says comes last, and so wins."""
    return (*(_DETERMINISTIC_NCCL if config.deterministic else ()), *config.nccl)


CACHE = ".trjax-cache"
"""Folder of compiled programs, beside those of runs."""


@contextmanager
def _jax_options(**values: Any) -> Iterator[None]:
    """Gives options of JAX other values for a while."""
    before = {name: jax.config.values[name] for name in values}
    try:
        for name, value in values.items():
            jax.config.update(name, value)
        reset_cache()  # JAX asks only once whether there is one, and where
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        reset_cache()


@contextmanager
def keep_compiled(runs: Path) -> Iterator[None]:
    """Has JAX keep compiled programs beside runs for a while, for the next that needs the same.

    A cache that JAX has been given is left. Code is run from there, so the folder must be this user's own.

    Args:
        runs: the folder of the runs' folders.

    Raises:
        OSError: it cannot be made, or written to, or is somebody else's.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        yield
        return
    folder = runs / CACHE
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK) or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is not this user's to write to")
    with _jax_options(jax_compilation_cache_dir=str(folder.absolute()), jax_persistent_cache_min_compile_time_secs=0.1):
        yield


@contextmanager
def without_cache() -> Iterator[None]:
    """Keeps JAX's compilation cache out: what it returns was not dumped, and for absent devices it cannot be read."""
    with _jax_options(jax_enable_compilation_cache=False):
        yield


@cache
def probe_options(
    mesh: Mesh, deterministic: bool = False, wanted: tuple[tuple[str, bool | int | str], ...] = ()
) -> CompilerOptions:
    """Returns the options of the mesh's platform that its compiler knows, found by compiling next to nothing.

    Options come and go between versions of XLA, and an unknown one is an error.

    Args:
        mesh: the devices; those of a topology description will do.
        deterministic: with those that give the same bits in every run.
        wanted: options to probe in place of the platform's own.

    Raises:
        jax.errors.JaxRuntimeError: the compiler fails for another reason.
    """
    platform = mesh.devices.flat[0].platform
    added = DETERMINISTIC.get(platform, {}) if deterministic else {}
    accepted: Options = dict(wanted) or {**_BY_PLATFORM.get(platform, {}), **added}
    dropped: list[str] = []
    nothing = jax.jit(lambda x: x, in_shardings=placement(mesh, REPLICATED)).lower(jax.ShapeDtypeStruct((), "float32"))
    while True:
        try:
            with without_cache():
                nothing.compile(accepted)
        except jax.errors.JaxRuntimeError as error:
            unknown = re.search(r"(?:No such compile option: '|setting option )(\w+)", str(error))
            if unknown is None or unknown.group(1) not in accepted:
                raise
            dropped.append(unknown.group(1))
            del accepted[dropped[-1]]
        else:
            return CompilerOptions(accepted, tuple(dropped))
