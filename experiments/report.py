"""What all experiments share: how they start and end, and how they print and write their results."""

import csv
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import jax
import tyro
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trjax.text import format_table

Row = dict[str, Any]


@dataclass(frozen=True)
class Common:
    """Options that every experiment has."""

    out: Path = Path("results")
    """Folder for the CSV and the figure."""


Options = TypeVar("Options", bound=Common)


def require_positive(**options: float) -> None:
    """Raises ValueError, with all of these options, unless each is positive."""
    if min(options.values()) <= 0:
        given = ", ".join(f"{name}={value:g}" for name, value in options.items())
        raise ValueError(f"{given}: must be positive")


def hardware() -> str:
    """Returns the devices here, by kind, and the number of CPU cores."""
    devices = jax.devices()
    return f"{len(devices)} {devices[0].platform} devices ({devices[0].device_kind}), {os.cpu_count()} CPU cores"


def _find_version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:  # run from a checkout, with PYTHONPATH=.
        return f"{package} from a checkout"


def announce(where: str, out: Path) -> None:
    """Prints the command, the versions, and where it runs or what it predicts for; makes the folder of the results."""
    out.mkdir(parents=True, exist_ok=True)  # early, so that a wrong folder costs no waiting
    print(f"$ {shlex.join(['python', *sys.argv])}\n{_find_version('jax')}, {_find_version('trjax')}, {where}")


def progress(text: str) -> None:
    """Prints to stderr what the experiment does now."""
    print(text, file=sys.stderr)


def print_rows(rows: Sequence[Row]) -> None:
    """Prints rows of the same columns as a table."""
    print(format_table(list(rows[0]), [list(row.values()) for row in rows]))


def save_rows(path: Path, rows: Sequence[Row]) -> None:
    """Writes rows as CSV; a cell is empty if its row has no such column."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Prints the table, and writes it as CSV."""
    print_rows(rows)
    save_rows(path, rows)


def write_tables(path: Path, tables: Mapping[str, Sequence[Row]]) -> None:
    """Prints tables below their names, and writes them as one CSV, whose first column is the table's name."""
    for name, rows in tables.items():
        print(f"\n{name}:")
        print_rows(rows)
    save_rows(path, [{"table": name} | row for name, rows in tables.items() for row in rows])


def style_axes(axes: Axes, title: str) -> None:
    """Gives a panel its title, and removes the frame above and to the right of it."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize="medium")


def save_axes(path: Path, figure: Figure, axes: Axes, title: str) -> None:
    """Writes a figure of one panel."""
    style_axes(axes, title)
    figure.savefig(path, dpi=150)


def save_panels(path: Path, figure: Figure, title: str, legend: Mapping[str, Artist] | None = None) -> None:
    """Writes a figure of several panels, with one legend below them: artists by label."""
    if legend:
        figure.legend(legend.values(), legend, loc="outside lower center", ncols=len(legend))
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def main(experiment: Callable[[Options], None], options: type[Options]) -> None:
    """Runs an experiment with the options of the command line; a mistake is one line, and exit code 2."""
    try:
        experiment(tyro.cli(options, config=(tyro.conf.FlagCreatePairsOff,)))
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
