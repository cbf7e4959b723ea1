"""JAX's cache of compiled programs: beside a run's folder, or kept out."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

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
