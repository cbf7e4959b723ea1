"""Import paths that have moved: they work for one more version, with a warning."""

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


def warn_of_move(old: str, new: str) -> None:
    """Warns that a name has moved; the warning points at the line that uses the old one."""
    warnings.warn(f"{old} is now {new}; version 0.2 drops the old name", DeprecationWarning, stacklevel=3)


def forward(old: str, *homes: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module whose names have moved.

    Args:
        old: the module's own name.
        homes: modules that hold its names now.
    """

    @cache  # `from ... import` asks a package twice, and one warning is enough
    def find(name: str) -> Any:
        for home in homes if not name.startswith("_") else ():
            if hasattr(module := import_module(home), name):
                warn_of_move(f"{old}.{name}", f"{home}.{name}")
                return getattr(module, name)
        raise AttributeError(f"module {old!r} has no attribute {name!r}")

    return find
