"""What small commands have in common: options, one line for a mistake, an exit code."""

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import tyro

Options = TypeVar("Options")


def tell(do: Callable[[], str]) -> int:
    """Prints what a command has to say, or a mistake (ValueError, OSError) as one line; returns 0, or 2."""
    try:
        said = do()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(said)
    return 0


def run_command(prog: str, options: type[Options], do: Callable[[Options], str], arguments: Sequence[str]) -> int:
    """Reads a command's options, and tells what it has to say, see `tell`.

    Args:
        prog: what it is called.
        options: a dataclass of its options.
        do: the command.
        arguments: the command line.
    """
    given = tyro.cli(options, prog=prog, args=list(arguments))
    return tell(lambda: do(given))
