"""Checks of a dataclass of options: its fields against their types, and the messages about refused values."""

import dataclasses
import typing
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar

import pydantic
from pydantic.fields import FieldInfo

_MAX_SHOWN = 100  # characters of a value, in a message
_BOUNDS = ("gt", "ge", "lt", "le")


class Checked:
    """Base of a frozen dataclass of options: each new instance is checked, and ValueError names refused values."""

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    section: ClassVar[str] = ""
    """Prefix of the options' names in messages."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        try:
            _model(kind).model_validate(vars(self))
        except pydantic.ValidationError as error:
            problems = [self.section + describe_problem(kind, problem) for problem in error.errors(include_url=False)]
            raise ValueError("; ".join(problems)) from None
        self.check_rules()

    def check_rules(self) -> None:
        """Raises ValueError if options do not fit each other."""

    def conflict(self, *options: str, why: str) -> ValueError:
        """Returns the error that names options with their values, and says why they do not fit."""
        first, *others = (f"{self.section}{option}={one_line(str(attrgetter(option)(self)))}" for option in options)
        return ValueError(f"{first} with {' and '.join(others)}: {why}" if others else f"{first}: {why}")


@cache
def _model(options: Any) -> type[pydantic.BaseModel]:
    """Returns a model that checks all fields at once. Validating the dataclass itself would make a second instance."""
    fields: dict[str, Any] = {field.name: (field.type, ...) for field in dataclasses.fields(options)}
    return pydantic.create_model(options.__name__, __config__=Checked.__pydantic_config__, **fields)


def one_line(text: str) -> str:
    """Returns the text on one line and not too long, for a message."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _range_rule(options: type, path: tuple[int | str, ...]) -> str:
    """Returns the range that is declared for an option, in words."""
    field: Any = FieldInfo.from_annotation(options)
    for part in path:
        items = typing.get_args(field.annotation)  # of a tuple
        field = FieldInfo.from_annotation(items[0]) if items else _model(field.annotation).model_fields[str(part)]
    bounds = {name: getattr(item, name) for name in _BOUNDS for item in field.metadata if hasattr(item, name)}
    low, *high = (f"{bound:.10g}" for bound in bounds.values())
    if not high:
        return "must be positive" if "gt" in bounds else "must not be negative"
    if bounds.keys() == {"ge", "le"}:
        return f"must be from {low} to {high[0]}"
    return f"must be in {'[' if 'ge' in bounds else '('}{low}, {high[0]}{']' if 'le' in bounds else ')'}"


def describe_problem(options: type, problem: Any) -> str:
    """Returns one line that names an option, its value and the rule that the value breaks, from pydantic's details."""
    option, value = one_line(".".join(part for part in problem["loc"] if isinstance(part, str))), problem["input"]
    rule = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{option}: unknown option"
    if problem.get("ctx", {}).keys() & set(_BOUNDS):
        rule = _range_rule(options, problem["loc"])
    if isinstance(value, dict):
        return rule if problem["type"] == "value_error" else f"{option}: {rule}"  # `check_rules` names its options
    return f"{option}={one_line(repr(value))}: {rule}"
