"""Configurations as TOML: written in full, read back, laid over one another."""

import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pydantic
import tomli_w

from trjax.config import Config


def _overlay(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        inner = base.get(key)
        merged[key] = _overlay(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def config_from_table(table: dict[str, Any], base: Config, where: str) -> Config:
    """Returns `base` with the values of a table of plain types laid over it.

    Raises:
        ValueError: names every option of `where` that is unknown, has the wrong type or an impossible value.
    """
    try:
        text = json.dumps(_overlay(asdict(base), table), default=str)
        return pydantic.TypeAdapter(Config).validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        problems = []
        for detail in error.errors(include_url=False):
            option = ".".join(str(part) for part in detail["loc"])
            unknown = detail["type"] in ("unexpected_keyword_argument", "extra_forbidden")
            message = "unknown option" if unknown else detail["msg"].removeprefix("Value error, ")
            given = "" if unknown or isinstance(detail["input"], dict) else f", not {detail['input']!r}"
            problems.append(f"{option}: {message}{given}" if option else message)
        raise ValueError(f"{where}: " + "; ".join(problems)) from None


def read_table(path: str | Path) -> dict[str, Any]:
    """Returns the table in a TOML file.

    Raises:
        ValueError: the file cannot be read or is not TOML; names the file.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"cannot read the configuration {path}: {error}") from error


def config_to_toml(config: Config) -> str:
    """Returns TOML text that reproduces the configuration.

    >>> import tomllib
    >>> config_from_table(tomllib.loads(config_to_toml(Config(epochs=3))), Config(), "x").epochs
    3
    """
    return tomli_w.dumps(asdict(config))
