"""Rules that hold for any option."""

import unicodedata
from typing import Any

import pydantic

FORBID = pydantic.ConfigDict(extra="forbid")
"""What is no option is an error."""
INT_LIMIT = 2**31  # examples and steps are counted in int32 on the devices
_FLOAT_LIMIT = 3.4e38  # float32's, in which the devices compute
LEAST_RATE, MOST_RATE = 1e-30, 1e30
"""Of a rate: float32 does not round it to 0, nor its product with a step to infinity."""
_NOT_TEXT = ("Cc", "Cs", "Zl", "Zp")  # control characters, halves of surrogate pairs, ends of lines and paragraphs


def require(holds: bool, what: str, rule: str) -> None:
    """Raises ValueError, naming the option and the rule, if that does not hold."""
    if not holds:
        raise ValueError(f"{what}: {rule}")


def check_values(options: Any, prefix: str = "") -> None:
    """Raises ValueError for what no option can be, whatever it means: a path with NUL, nan, a number beyond int32."""
    for name, value in vars(options).items():
        for item in value if isinstance(value, tuple) else (value,):
            what = f"{prefix}{name}={item!r}"
            if isinstance(item, str):
                is_text = not any(unicodedata.category(character) in _NOT_TEXT for character in item)
                require(is_text, what, "must be one line of text, without control characters")
            elif isinstance(item, float):
                require(abs(item) <= _FLOAT_LIMIT, what, f"must be a number, of at most {_FLOAT_LIMIT:g}")
            elif isinstance(item, int) and name != "seed":
                require(-INT_LIMIT < item < INT_LIMIT, what, "must be below 2^31")
