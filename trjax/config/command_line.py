"""From a command line to a configuration."""

import argparse
from collections.abc import Sequence
from dataclasses import make_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from trjax.config.presets import PRESETS, preset_config
from trjax.config.run import Config
from trjax.config.toml import config_from_table, read_table
from trjax.text import describe_error

Own = TypeVar("Own")


def _saved_config(workdir: str) -> Path | None:
    """Returns the file of the run that the folder holds, if it holds one."""
    saved = Path(workdir, "config.toml")
    try:
        return saved if saved.is_file() else None
    except (OSError, ValueError) as error:  # too long a name, no permission; NUL
        raise ValueError(f"workdir={workdir!r} cannot be used: {describe_error(error)}") from error


def _base_config(arguments: Sequence[str]) -> Config:
    """Returns what the other options start from: a preset, a file over its preset, or the resumed run's own."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--preset", "--config", "--workdir"):
        parser.add_argument(option, nargs="?")
    given, _ = parser.parse_known_args(list(arguments))
    if given.config == "":
        raise ValueError("config='': names no file; leave --config out to start from a preset")
    if given.config:
        file = Path(given.config)
    elif given.workdir and given.preset is None and (saved := _saved_config(given.workdir)):
        file = saved
    else:
        return preset_config("digits" if given.preset is None else given.preset)
    table = read_table(file)
    name = str(table.get("preset", "digits") if given.preset is None else given.preset)
    base = Config() if name == Config().preset else preset_config(name)
    return config_from_table({**table, "preset": name}, base, str(file))


def parse_options(arguments: Sequence[str], prog: str, purpose: str, own: Own) -> tuple[Config, Own]:
    """Returns the configuration that a command line asks for, and a command's own options.

    Later ones win: preset, `--config` file (or the config.toml of a resumed `--workdir`), options.

    Args:
        arguments: the command line.
        prog: what the command is called.
        purpose: what it does, for `--help`.
        own: a frozen dataclass of the command's own options, with their defaults.

    Raises:
        ValueError: an unknown preset, a file that cannot be used, or an impossible combination.
        SystemExit: an unknown option or a value of the wrong type (2), or `--help` (0).
    """
    presets = "\n".join(f"  {name}: {preset.expected}" for name, preset in PRESETS.items())
    description = f"{purpose}\n\nPresets, with the expected result:\n{presets}"
    file = tyro.conf.arg(help="TOML file laid over the preset; options on the command line win over it.")
    fields = [
        ("own", Annotated[type(own), tyro.conf.arg(name="")]),
        ("run", Annotated[Config, tyro.conf.arg(name="")]),
        ("config", Annotated[str, file]),
    ]
    kind: Any = make_dataclass("Arguments", fields, frozen=True)
    default = kind(own, _base_config(arguments), "")
    given = tyro.cli(kind, args=list(arguments), prog=prog, description=description, default=default)
    return given.run, given.own
