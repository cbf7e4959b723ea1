"""What small commands have in common: options, one line for a mistake, an exit code."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from typing import Annotated, Any, TypeVar

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


def read_options(prog: str, options: type[CommandOptions], arguments: Sequence[str]) -> CommandOptions:
    """Returns a command's options, read from a command line.

    Args:
        prog: the command's name.
        options: a dataclass of its options; its docstring describes the command.
        arguments: the command line.

    Raises:
        ValueError: the dataclass refuses a value.
        SystemExit: an unknown option or a value of the wrong type (2), or `--help` (0).
    """
    # In a field: of the outermost class, tyro itself catches the ValueError and prints it in a box.
    kind: Any = make_dataclass("Arguments", [("options", Annotated[options, tyro.conf.arg(name="")])])
    return tyro.cli(kind, args=list(arguments), prog=prog, description=options.__doc__).options


def run_command(
    prog: str, options: type[CommandOptions], do: Callable[[CommandOptions], str], arguments: Sequence[str]
) -> int:
    """Reads a command's options and prints its result, see `print_result`; returns the exit code.

    Args:
        prog: the command's name.
        options: a dataclass of its options, see `read_options`.
        do: returns the command's result.
        arguments: the command line.
    """
    return print_result(lambda: do(read_options(prog, options, arguments)))
