"""Text for people: tables, and the reasons of errors."""

import re
from collections.abc import Sequence
from typing import Any

_NUMBER = re.compile(r"(-?[\d,]+(\.\d+)?(e[-+]\d+)?%?|nan|-?inf)?")


def format_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns aligned columns: numbers to the right, formatted ones too, and all other text to the left.

    >>> print(format_table(["n", "name", "share"], [[1, "a", "9.5%"], [10, "bc", "90.5%"]]))
     n  name  share
     1  a      9.5%
    10  bc    90.5%
    """
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    columns = []
    for name, *column in zip(*cells, strict=True):
        width = max(map(len, (name, *column)))
        justify = str.rjust if all(map(_NUMBER.fullmatch, column)) else str.ljust
        columns.append([justify(cell, width) for cell in (name, *column)])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def describe_error(error: BaseException) -> str:
    """Returns the reason of an error on one line, without the file name or the error number.

    >>> describe_error(FileNotFoundError(2, "No such file or directory", "a.txt")), describe_error(KeyError())
    ('No such file or directory', 'KeyError')
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__
