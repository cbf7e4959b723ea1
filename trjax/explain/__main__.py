"""`python -m trjax.explain`: what a run compiles to and what summing costs, before it runs."""

import signal
import sys
from collections.abc import Sequence
from importlib import import_module

_USAGE = """usage: python -m trjax.explain COMMAND [OPTIONS]

  plan   the table of groups and regions: where every gradient lives
  step   compile the train step, for GPUs that need not be here: every collective, its cost, what hides it
  cost   what each way to sum over ranks takes, by formulas alone, and where each wins

`python -m trjax.explain COMMAND --help` lists the options: for plan and step those of trjax.train and a few more."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if arguments else 2
    try:
        if arguments[0] not in ("plan", "step", "cost"):
            raise ValueError(f"unknown command {arguments[0]!r}\n{_USAGE}")
        # Imported here, since JAX takes seconds to import, and formulas do not need it.
        return import_module(f"trjax.explain.{arguments[0]}").main(arguments[1:])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the command, without a traceback
    sys.exit(main(sys.argv[1:]))
