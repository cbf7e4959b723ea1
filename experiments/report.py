"""What experiments have in common: how they start, how they end, what they print and write."""

import csv
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import jax
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trjax.text import format_table

Options = TypeVar("Options")


def hardware() -> str:
    """Returns what is here: the devices, by kind, and the CPU cores."""
    devices = jax.devices()
    return f"{len(devices)} {devices[0].platform} devices ({devices[0].device_kind}), {os.cpu_count()} CPU cores"


def announce(where: str, out: Path) -> None:
    """Prints the command, the versions, and where it runs or what it predicts for; makes the folder of the results."""
    out.mkdir(parents=True, exist_ok=True)  # now, so that a wrong one costs no waiting
    print(f"$ {shlex.join(['python', *sys.argv])}\njax {version('jax')}, trjax {version('trjax')}, {where}")


def progress(text: str) -> None:
    """Prints what takes long now, beside the results."""
    print(text, file=sys.stderr)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Prints the table, and writes it as CSV."""
    print(format_table(list(rows[0]), [list(row.values()) for row in rows]))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def save_axes(path: Path, figure: Figure, axes: Axes, title: str) -> None:
    """Writes a figure of one panel, without a frame above and to the right of it."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize="medium")
    figure.savefig(path, dpi=150)


def main(experiment: Callable[[Options], None], options: type[Options]) -> None:
    """Runs an experiment with the options of the command line; a mistake is one line, and exit code 2."""
    try:
        experiment(tyro.cli(options, config=(tyro.conf.FlagCreatePairsOff,)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
