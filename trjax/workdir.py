"""A run's own folder: made new, or checked to hold the same run."""

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trjax.config import Config
from trjax.tables import config_from_table, config_to_toml, read_table

_MAY_CHANGE = {
    "preset", "devices", "platform", "epochs", "reducer", "bucket_mb", "hosts", "nccl", "link_gbytes", "log_every",
    "workdir", "data.root",
}  # fmt: skip
"""Options that a resumed run may be given anew; another value of any other would make it another run."""


def _flat_options(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    options: dict[str, Any] = {}
    for key, value in table.items():
        options |= _flat_options(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return options


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
            _check_same_run(config, workdir / "config.toml")
        elif (workdir / "checkpoints").exists():
            raise ValueError(f"workdir={workdir} holds checkpoints but no config.toml; use another folder")
    except OSError as error:
        raise ValueError(f"workdir={config.workdir or 'runs'} cannot be used: {error}") from error
    return workdir


def write_config(config: Config, workdir: Path) -> None:
    """Writes config.toml: what reproduces the run, in a folder of its own.

    Raises:
        ValueError: the folder cannot be written to.
    """
    path = workdir / "config.toml"
    try:
        path.with_suffix(".partial").write_text(config_to_toml(replace(config, workdir="")), encoding="utf-8")
        path.with_suffix(".partial").replace(path)
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


def _check_same_run(config: Config, path: Path) -> None:
    saved = _flat_options(asdict(config_from_table(read_table(path), Config(), str(path))))
    given = _flat_options(asdict(config))
    differing = [
        f"{option} is {saved[option]!r} there and {value!r} here"
        for option, value in given.items()
        if option not in _MAY_CHANGE and saved[option] != value
    ]
    if differing:
        raise ValueError(
            f"{path.parent} holds another run: {'; '.join(differing)}; "
            "use another --workdir, or leave these options out to resume it"
        )
