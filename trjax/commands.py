"""What small commands have in common: options, one line for a mistake, an exit code."""

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import tyro

CommandOptions = TypeVar("CommandOptions")


def print_result(do: Callable[[], str]) -> int:
    """Prints a command's result, or its mistake (ValueError, OSError) as one line; returns 0, or 2."""
    try:
        result = do()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(result)
    return 0


def run_command(
    prog: str, options: type[CommandOptions], do: Callable[[CommandOptions], str], arguments: Sequence[str]
) -> int:
    """Reads a command's options and prints its result, see `print_result`; returns the exit code.

    Args:
        prog: the command's name.
        options: a dataclass of its options.
        do: returns the command's result.
        arguments: the command line.
    """
    return print_result(lambda: do(tyro.cli(options, prog=prog, args=list(arguments))))
