"""Types of options: what a field may hold, declared where the field is."""

import unicodedata
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, Field, InstanceOf

MAY_CHANGE = "may change on resume"
"""Marks an option that may differ when a run is resumed. Any other option identifies the run."""
INT_LIMIT = 2**31  # examples and steps are counted in int32 on the devices
_FLOAT_LIMIT = 3.4e38  # float32's, in which the devices compute
_NOT_TEXT = ("Cc", "Cs", "Zl", "Zp")  # control characters, halves of surrogate pairs, ends of lines and paragraphs


def rule(holds: Callable[[Any], object], text: str) -> AfterValidator:
    """Declares a rule that pydantic's `Field` cannot express; a message about a refused value ends with `text`."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(text)
        return value

    return AfterValidator(check)


def zero_or(low: float, high: float, meaning: str) -> AfterValidator:
    """Declares a range for an option that may also be 0, outside of the range; `meaning` says what 0 stands for."""
    text = f"must be from {low:.10g} to {high:.10g}, or 0 {meaning}"
    return rule(lambda value: value == 0 or low <= value <= high, text)


def _is_text(value: str) -> bool:
    return not any(unicodedata.category(character) in _NOT_TEXT for character in value)


_INT32 = rule(lambda value: value < INT_LIMIT, f"must be at most {INT_LIMIT - 1}, the largest int32")
_FLOAT32 = rule(lambda value: value <= _FLOAT_LIMIT, f"must be at most {_FLOAT_LIMIT:g}, the largest float32")
PositiveInt32 = Annotated[int, Field(gt=0), _INT32]
NonNegativeInt32 = Annotated[int, Field(ge=0), _INT32]
NonNegativeFloat32 = Annotated[float, Field(ge=0), _FLOAT32]
# InstanceOf: pydantic's own check of a str would refuse half a surrogate pair before the rule names it.
Text = Annotated[str, InstanceOf(), rule(_is_text, "must be one line of text, without control characters")]
INCREASING = rule(lambda values: list(values) == sorted(set(values)), "must increase")
