"""The memory of this machine: what cannot fit is refused before anybody asks for it, and is killed for it."""

import os
from contextlib import suppress
from pathlib import Path

_LIMIT_FILE = Path("/sys/fs/cgroup/memory.max")  # of a container; its number, or the word max


def present_bytes() -> int:
    """Returns the memory of this machine, or what a container leaves of it."""
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        present = min(present, int(_LIMIT_FILE.read_text(encoding="ascii")))
    return present


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
