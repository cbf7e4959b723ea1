"""Configurations as TOML: written in full, read back, laid over one another."""

import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pydantic
import tomli_w

from trjax.config.checks import describe_problem, one_line
from trjax.config.run import Config
from trjax.text import describe_error

_MAX_BYTES = 2**14  # of a file; written in full, one takes two thousand; tomllib needs the square of a dotted key


def _overlay(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        inner = base.get(key)
        merged[key] = _overlay(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _describe(problem: Any) -> str:
    """Returns one line that names an option and what is wrong with it."""
    text = describe_problem(Config, problem)
    return f"{text} (in the file itself: the command's options come after)" if "pass --" in text else text


def config_from_table(table: dict[str, Any], base: Config, where: str) -> Config:
    """Returns `base` with the values of a table of plain types laid over it.

    Raises:
        ValueError: names every option of `where` that is unknown, has the wrong type or an impossible value.
    """
    try:
        # No option is a date, and no table fits where a plain value belongs.
        text = json.dumps(_overlay(asdict(base), table), default=lambda date: {"date": str(date)})
        return pydantic.TypeAdapter(Config).validate_json(text)
    except pydantic.ValidationError as error:
        problems = [_describe(problem) for problem in error.errors(include_url=False)]
        raise ValueError(f"{one_line(where)}: " + "; ".join(problems)) from None
    except (ValueError, RecursionError) as error:  # JSON has no integers of thousands of digits, nor such depths
        raise ValueError(f"{one_line(where)}: {describe_error(error)}") from None


def read_table(path: str | Path) -> dict[str, Any]:
    """Returns the table in a TOML file.

    Raises:
        ValueError: the file cannot be read, is not TOML or larger than any configuration; names the file.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"it is larger than {_MAX_BYTES:,} bytes")
        return tomllib.loads(content.decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read the configuration {one_line(str(path))}: {describe_error(error)}") from error


def config_to_toml(config: Config) -> str:
    """Returns TOML text that reproduces the configuration.

    >>> import tomllib
    >>> config_from_table(tomllib.loads(config_to_toml(Config(epochs=3))), Config(), "x").epochs
    3
    """
    return tomli_w.dumps(asdict(config))
