"""A run's own folder: made new, or checked to hold the same run."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

from filelock import FileLock, Timeout

from trjax.config.fields import MAY_CHANGE
from trjax.config.run import Config
from trjax.config.toml import config_from_table, config_to_toml, read_table
from trjax.files import atomic_write


def options_that_may_change(options: Any = Config, prefix: str = "") -> set[str]:
    """Returns the dotted names of the options that may differ when a run is resumed, as their fields declare."""
    names: set[str] = set()
    for field in fields(options):
        kind: Any = field.type
        if is_dataclass(kind):
            names |= options_that_may_change(kind, f"{prefix}{field.name}.")
        elif MAY_CHANGE in get_args(kind):
            names.add(prefix + field.name)
    return names


def flat_options(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the options of a nested table by their dotted names."""
    options: dict[str, Any] = {}
    for key, value in table.items():
        options |= flat_options(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return options


def read_config(workdir: Path) -> Config:
    """Returns the options of the run in a folder.

    Raises:
        ValueError: there is none, or its file cannot be used.
    """
    path = workdir / "config.toml"
    if not path.is_file():
        raise ValueError(f"{workdir} holds no run: there is no config.toml in it")
    return config_from_table(read_table(path), Config(), str(path))


def check_same_run(config: Config, workdir: Path) -> None:
    """Raises ValueError if a folder holds a run with other options, and names them."""
    saved = flat_options(asdict(read_config(workdir)))
    given = flat_options(asdict(config))
    may_change = options_that_may_change()
    differing = [
        f"{option} is {saved[option]!r} there and {value!r} here"
        for option, value in given.items()
        if option not in may_change and saved[option] != value
    ]
    if differing:
        raise ValueError(
            f"{workdir} holds another run: {'; '.join(differing)}; "
            "use another --workdir, or leave these options out to resume it"
        )


def open_workdir(config: Config) -> Path:
    """Creates the run's folder, or checks that an existing one holds the same run.

    Raises:
        ValueError: the folder cannot be used, or holds a run with other options; names them.
    """
    try:
        if not config.workdir:
            return _new_workdir(config)
        workdir = Path(config.workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        if (workdir / "config.toml").exists():
            check_same_run(config, workdir)
        elif (workdir / "checkpoints").exists():
            raise ValueError(f"workdir={workdir} holds checkpoints but no config.toml; use another folder")
    except OSError as error:
        raise ValueError(f"workdir={config.workdir or 'runs'} cannot be used: {error}") from error
    return workdir


@contextmanager
def lock_workdir(workdir: Path) -> Iterator[None]:
    """Keeps other runs out of the folder; the operating system drops the lock when the process ends, however it ends.

    Raises:
        ValueError: another run holds the lock (the message names its process and host), or the folder cannot be locked.
    """

    def name_owner(descriptor: int) -> None:
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    path = workdir / "lock"
    lock = FileLock(path, blocking=False, on_acquired=name_owner)
    try:
        acquired = lock.acquire()
    except Timeout as error:
        owner = path.read_text(encoding="utf-8").strip() or "another run"
        raise ValueError(f"workdir={workdir} is in use by {owner}") from error
    except OSError as error:  # no permission, a file system without locks, or a full one
        raise ValueError(f"workdir={workdir} cannot be locked: {error}") from error
    with acquired:
        yield


def write_config(config: Config, workdir: Path) -> None:
    """Writes config.toml: what reproduces the run, in a folder of its own.

    Raises:
        ValueError: the folder cannot be written to.
    """
    path = workdir / "config.toml"
    try:
        with atomic_write(path) as partial:
            partial.write_text(config_to_toml(replace(config, workdir="")), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"workdir={workdir} cannot be used: {error}") from error


def _new_workdir(config: Config) -> Path:
    name = f"{config.preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1, 1000):
        workdir = Path("runs", name if attempt == 1 else f"{name}-{attempt}")
        try:
            workdir.mkdir(parents=True)
        except FileExistsError:
            continue
        return workdir
    raise ValueError(f"runs/{name} exists a thousand times over; pass --workdir")
