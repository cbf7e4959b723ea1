"""The memory of this machine: what cannot fit is refused before anybody asks for it, and is killed for it."""

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

from jax.sharding import Mesh

_LIMIT_FILE = Path("/sys/fs/cgroup/memory.max")  # of a container; its number, or the word max

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # options of glibc's mallopt


def keep_freed() -> None:
    """Has glibc's allocator keep what is freed, for the whole process and until it ends; elsewhere does nothing.

    Else the buffers of a CPU step go back to the kernel behind every step, which then makes them anew, page by page:
    15 % of ResNet-20's step. Only the first arena can keep them, so threads that start later share it; on two cores
    compiling then takes a seventh longer. Source: mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_ARENA_MAX, 1)


def present_bytes() -> int:
    """Returns the memory of this machine, or what a container leaves of it."""
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        present = min(present, int(_LIMIT_FILE.read_text(encoding="ascii")))
    return present


def device_bytes(mesh: Mesh) -> int:
    """Returns the memory of each device of this process: what a GPU lets JAX have, or its part of this machine's."""
    own = mesh.local_devices
    stats = own[0].memory_stats() if own[0].platform != "cpu" else None
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else present_bytes() // len(own)


def require_device(what: str, mesh: Mesh, needed_bytes: float, remedy: str) -> None:
    """Refuses what needs more memory on each device than there is.

    Args:
        what: needs it, with the options that say how much.
        mesh: the devices.
        needed_bytes: on each of them, at least.
        remedy: for the message.

    Raises:
        ValueError: there is less; says how much.
    """
    if needed_bytes > (present := device_bytes(mesh)):
        devices = f"each of {len(mesh.local_devices)} {mesh.local_devices[0].device_kind} devices"
        needed, has = needed_bytes / 1e9, present / 1e9
        raise ValueError(f"{what}: needs {needed:,.1f} GB of memory on {devices}, which has {has:,.1f}; {remedy}")


def require_memory(what: str, needed_bytes: float, remedy: str) -> None:
    """Refuses what needs more memory than there is.

    Args:
        what: needs it, with the options that say how much.
        needed_bytes: at least.
        remedy: for the message.

    Raises:
        ValueError: there is less; says how much.
    """
    if needed_bytes > (present := present_bytes()):
        raise ValueError(
            f"{what}: needs {needed_bytes / 1e9:,.1f} GB of memory, of which there are {present / 1e9:,.1f}; {remedy}"
        )
