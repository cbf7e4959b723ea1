"""`python -m trjax.data COMMAND`: folders of images packed, checked and described; CIFAR downloaded."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from trjax.commands import run_command
from trjax.data.download import download
from trjax.data.image_files import ReportProgress, count_cores
from trjax.data.pack import PackOptions, pack
from trjax.data.shards import Index
from trjax.data.survey import describe_folder, verify

_LINE_SECONDS = 60.0  # between two lines on what is done, where there is no terminal for a bar


@dataclass(frozen=True)
class Pack:
    """Pack the images of train/CLASS, val/CLASS and so on into a few large files, none larger than needed.

    Started again, a pack that was stopped resumes where it was.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Folder of the images."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Folder for the packed ones."""
    options: Annotated[PackOptions, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Verify:
    """Read every image of a folder, packed or not; exit with 1 if one is damaged."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder of train, val and test, or of one of them."""
    workers: int = count_cores()
    """Number of threads; the default is one a core."""


@dataclass(frozen=True)
class Stats:
    """Report how many images a folder holds, packed or not, their sizes, and their mean and deviation."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder of train, val and test, or of one of them."""
    most: int = 2000
    """Images of a split to look at, evenly spread."""
    workers: int = count_cores()
    """Number of threads; the default is one a core."""


@dataclass(frozen=True)
class Download:
    """Download CIFAR's archive, or the rest of it, for --data.root."""

    name: Annotated[Literal["cifar10", "cifar100"], tyro.conf.Positional]
    """Set."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Folder for it."""
    mirror: tuple[str, ...] = ()
    """Addresses to try before the official one, of the archive, or of its folder with a slash at the end."""


@dataclass(frozen=True)
class DataOptions:
    """Images packed, checked and described; CIFAR downloaded."""

    command: Annotated[Pack | Verify | Stats | Download, tyro.conf.arg(name="")]


@contextmanager
def _show_progress() -> Iterator[ReportProgress]:
    """Shows a bar for everything that is reported; without a terminal, a line now and then."""
    console, last = Console(stderr=True), time.monotonic()
    tasks: dict[str, TaskID] = {}
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn()

    def report(name: str, done: int, total: int) -> None:
        nonlocal last
        if name not in tasks:
            tasks[name] = progress.add_task(name, completed=done, total=total)
        progress.update(tasks[name], completed=done, total=total)
        if not console.is_terminal and time.monotonic() - last > _LINE_SECONDS:
            last = time.monotonic()
            console.print(f"{name}: {done:,} of {total:,}")

    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield report


def _format_packed(folder: Path, index: Index) -> str:
    """Returns the lines on a packed split: the images that are not in it, and a summary."""
    left_out = [f"left out: {bad}\n" for shard in index.shards for bad in shard.left_out]
    size = sum(shard.size_bytes for shard in index.shards) / 1e6
    return (
        f"{''.join(left_out)}{folder}: {index.examples:,} images of {len(index.classes):,} classes in "
        f"{len(index.shards)} shards, {size:,.1f} MB; {len(left_out)} left out"
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code: 0, 1 if something is damaged, 2 for a mistake, 130 if stopped."""
    sound = True

    def do(options: DataOptions) -> str:
        nonlocal sound
        command = options.command
        with _show_progress() as report:
            if isinstance(command, Pack):
                packed = pack(command.source, command.target, command.options, report)
                return "\n".join(_format_packed(command.target / name, index) for name, index in packed.items())
            if isinstance(command, Verify):
                text, sound = verify(command.folder, command.workers, report)
                return text
            if isinstance(command, Stats):
                return describe_folder(command.folder, command.most, command.workers, report)
            return download(command.name, command.target, command.mirror, report)

    try:
        return run_command("python -m trjax.data", DataOptions, do, arguments) or int(not sound)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; started again, pack and download resume where they were")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
