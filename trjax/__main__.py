"""`python -m trjax COMMAND`: one entry to every command, each the same as `python -m trjax.COMMAND`."""

import runpy
import sys

COMMANDS = {
    "train": "train a model, or resume a run",
    "explain": "show what a run compiles to and what summing costs, before it runs",
    "data": "pack, verify, measure or download data sets",
    "predict": "print the classes of images",
    "export": "write a trained model for other programs",
    "report": "write a page about one run or several",
    "preview": "write a sheet of training images as the network gets them",
    "launch": "start several processes of one run on this machine",
}
"""Every command, with its purpose."""
_USAGE = "usage: python -m trjax COMMAND [OPTIONS]\n\n" + "\n".join(
    f"  {name:8} {purpose}" for name, purpose in COMMANDS.items()
)


def main(arguments: list[str]) -> int:
    """Runs a command, which ends the process; returns the exit code if there is no such command."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        print(f"error: unknown command {arguments[0]!r}\n{_USAGE}", file=sys.stderr)
        return 2
    sys.argv = [f"trjax {arguments[0]}", *arguments[1:]]
    runpy.run_module(f"trjax.{arguments[0]}", run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
