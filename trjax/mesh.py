"""Devices to mesh: which devices a run uses, the axes over them, and the two ways to place arrays."""

import contextlib
import math
import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trjax.cost.machines import Machine, Topology, make_machine
from trjax.cost.targets import target_of_device

Platform = Literal["auto", "cpu", "cuda"]
"""What `--platform` takes."""

HOSTS, LOCAL = "hosts", "local"
"""The mesh axes: over hosts, and over the devices of each."""
AXIS = (HOSTS, LOCAL)
"""Both: the devices over which the batch is split and gradients are summed."""

SPLIT = PartitionSpec(AXIS)
"""Leading dim split over the devices, in order."""
SPLIT_MICRO = PartitionSpec(None, AXIS)
"""Second dim split over the devices, behind the dim of micro-batches."""
REPLICATED = PartitionSpec()
"""The whole array on every device."""

_MAX_DEVICES, _MAX_DIGITS = 4096, 20
_MAX_CPU_DEVICES = 256  # of so many threads, 512 do not meet in an AllReduce before XLA gives up and aborts
_COLLECTIVE_MEMORY_MB = 1024  # the buffers of 268 million float32 gradients; ResNet-152 takes 241 MB
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version")


def parse_devices(spec: str) -> tuple[int, ...]:
    """Returns the device indices that a specification names; empty for `all`.

    >>> parse_devices("0-3"), parse_devices("0,2,5"), parse_devices("all")
    ((0, 1, 2, 3), (0, 2, 5), ())

    Raises:
        ValueError: the specification is malformed, a range is reversed, or an index is repeated.
    """
    if spec.strip() == "all":
        return ()
    indices: dict[int, None] = {}  # in order
    for part in spec.split(","):
        first, dash, last = (text.strip() for text in part.partition("-"))
        bounds = [first, last] if dash else [first]
        if not all(bound.isascii() and bound.isdigit() for bound in bounds):
            raise ValueError(f"devices={spec!r}: {part!r} is neither an index nor a range; write all, 0-3 or 0,2,5")
        if (digits := max(map(len, bounds))) > _MAX_DIGITS:
            raise ValueError(f"devices={spec!r}: an index of {digits} digits is out of range")
        low, high = int(bounds[0]), int(bounds[-1])
        if low > high:
            raise ValueError(f"devices={spec!r}: the range {part.strip()} is reversed; write {high}-{low}")
        if high >= _MAX_DEVICES:
            raise ValueError(f"devices={spec!r}: index {high} is out of range; at most {_MAX_DEVICES} devices")
        for index in range(low, high + 1):
            if index in indices:
                raise ValueError(f"devices={spec!r}: device {index} is named more than once")
            indices[index] = None
    return tuple(indices)


def _has_driver() -> bool:
    return any(Path(file).exists() for file in _DRIVER_FILES)


def choose_platform(platform: Platform) -> str:
    """Returns the platform to use, as JAX's `jax_platforms` has it; selects nothing yet.

    Args:
        platform: asked for; auto: the one that `JAX_PLATFORMS` names, else cuda where there is a driver.

    Raises:
        ValueError: `platform` is cuda and there is no NVIDIA driver.
    """
    has_driver = _has_driver()
    if platform == "cuda" and not has_driver:
        raise ValueError("platform=cuda: no NVIDIA driver found on this machine; use --platform cpu")
    if platform != "auto":
        return platform
    named: str | None = getattr(jax.config, "jax_platforms", None)  # by the environment, say
    return named or ("cuda" if has_driver else "cpu")


def start_platform(platform: Platform, devices: str, nccl: Sequence[str] = ()) -> None:
    """Selects the platform before JAX's first use, and on the CPU makes as many devices as named.

    Without an NVIDIA driver the CUDA plugin is never asked, so that it does not log its failure. With one, room for
    the AllReduce buffers is set aside on every GPU, `XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB`.

    Args:
        platform: as `choose_platform` takes it.
        devices: as `parse_devices` reads it.
        nccl: NAME=VALUE pairs for NCCL's environment, read when it first connects.

    Raises:
        ValueError: `platform` is cuda and there is no NVIDIA driver, or `devices` is malformed or more than the CPU
            can simulate.
    """
    indices = parse_devices(devices)
    for pair in nccl:
        name, _, value = pair.partition("=")
        os.environ[name] = value
    chosen = choose_platform(platform)
    with contextlib.suppress(RuntimeError):  # devices exist already: `make_mesh` says how many
        if _has_driver():
            os.environ.setdefault("XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB", str(_COLLECTIVE_MEMORY_MB))
        jax.config.update("jax_platforms", chosen)
        if indices and chosen == "cpu":
            if max(indices) >= _MAX_CPU_DEVICES:
                raise ValueError(f"devices={devices!r}: at most {_MAX_CPU_DEVICES} simulated CPU devices")
            jax.config.update("jax_num_cpu_devices", max(indices) + 1)


def mesh_over(devices: Sequence[jax.Device], hosts: int) -> Mesh:
    """Returns the mesh over devices in order, as hosts x devices of each."""
    # Auto, because `jax.make_mesh` would make the axes Explicit, which types every array of the program.
    grid = np.array(devices).reshape(hosts, -1)
    return Mesh(grid, AXIS, axis_types=(AxisType.Auto,) * len(AXIS))


def count_hosts(where: Sequence[str]) -> int:
    """Returns the number of hosts, from the host of every device; 1, a ring over all, if they are no equal runs.

    >>> count_hosts("aabb"), count_hosts("abab"), count_hosts("aab")
    (2, 1, 1)
    """
    runs = [len(list(run)) for _, run in groupby(where)]
    unequal_or_interleaved = len(set(runs)) > 1 or len(runs) > len(set(where))
    return 1 if unequal_or_interleaved else len(runs)


def make_mesh(devices: str = "all", hosts: int = 0, names: Sequence[str] = ()) -> Mesh:
    """Returns the mesh over the named devices of every process, in the order named, as hosts x devices of each.

    Args:
        devices: as `parse_devices` reads it.
        hosts: that the devices are said to lie on, for study; 0: as many as there are.
        names: of the host of every process; empty: one host.

    Raises:
        ValueError: the specification is malformed, an index out of range (says how many devices there are), the
            hosts do not divide them, or the platform has a driver but no usable device.
    """
    try:
        present = jax.devices()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"no device can be used ({reason}); --platform cpu works everywhere") from error
    by_process = [
        [device for device in present if device.process_index == process]
        for process in sorted({device.process_index for device in present})
    ]
    count = min(len(own) for own in by_process)
    indices = parse_devices(devices) or tuple(range(count))
    if max(indices) >= count:
        raise ValueError(
            f"devices={devices!r}: index {max(indices)} is out of range; "
            f"there are {count} {present[0].platform} devices, 0-{count - 1}"
        )
    chosen = [own[index] for own in by_process for index in indices]
    hosts = hosts or count_hosts([names[device.process_index] if names else "" for device in chosen])
    if len(chosen) % hosts:
        raise ValueError(f"hosts={hosts} do not divide the {len(chosen)} devices equally")
    return mesh_over(chosen, hosts)


def split_batch(global_batch: int, world_size: int, micro_batches: int = 1) -> int:
    """Returns the examples of one device in one micro-batch: no rank chooses its own.

    >>> split_batch(96, 8), split_batch(96, 8, micro_batches=3)
    (12, 4)

    Raises:
        ValueError: not divisible; names the nearest valid sizes.
    """
    parts = world_size * micro_batches
    size, rest = divmod(global_batch, parts)
    if rest:
        nearest = [str(count * parts) for count in (size, size + 1) if count]
        by = f"world_size={world_size}" + (f" times accumulate={micro_batches}" if micro_batches > 1 else "")
        raise ValueError(f"global_batch={global_batch} is not divisible by {by}; nearest valid: {', '.join(nearest)}")
    return size


def placement(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """Returns the sharding of `SPLIT` or `REPLICATED` arrays on the mesh."""
    return NamedSharding(mesh, spec)


def own_rows(mesh: Mesh, dims: tuple[int, ...], spec: PartitionSpec) -> np.ndarray:
    """Returns which examples of a batch lie on this process's devices: their positions in it, in order.

    Args:
        mesh: the devices of all processes.
        dims: the leading dims of the batch, whose examples are counted in row-major order.
        spec: `SPLIT` or `SPLIT_MICRO`.
    """
    positions = np.arange(math.prod(dims)).reshape(dims)
    blocks = placement(mesh, spec).addressable_devices_indices_map(dims).values()
    return np.unique(np.concatenate([positions[block].ravel() for block in blocks]))


def place(mesh: Mesh, spec: PartitionSpec, rows: Any) -> jax.Array:
    """Returns the array over all devices of which this process holds `rows`, those of its own devices."""
    return jax.make_array_from_process_local_data(placement(mesh, spec), rows)


def fill(mesh: Mesh, shape: tuple[int, ...], value: float) -> jax.Array:
    """Returns an array of one float32 value, split over the devices."""
    return place(mesh, SPLIT, np.full((len(own_rows(mesh, shape[:1], SPLIT)), *shape[1:]), value, np.float32))


def machine_of(mesh: Mesh, link_gbytes: float = 0.0) -> Machine:
    """Returns what the cost model takes the devices of a mesh for."""
    target = target_of_device(mesh.devices.flat[0].device_kind)
    return make_machine(target, Topology(*mesh.devices.shape), link_gbytes)
