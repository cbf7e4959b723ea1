"""Text for people: tables."""

from collections.abc import Sequence
from typing import Any


def format_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns aligned columns: numbers to the right, the rest to the left.

    >>> print(format_table(["n", "name"], [[1, "a"], [10, "bc"]]))
     n  name
     1  a
    10  bc
    """
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    numeric = [all(isinstance(row[column], int | float) for row in rows) for column in range(len(header))]
    lines = []
    for row in cells:
        parts = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)
