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
from trjax.data.pack import How, pack
from trjax.data.shards import Index, printable
from trjax.data.survey import describe_folder, verify

_LINE_SECONDS = 60.0  # between two lines on what is done, where there is no terminal for a bar
_CORES = count_cores()


@dataclass(frozen=True)
class Pack:
    """Pack the images of train/CLASS, val/CLASS and so on into a few large files, none larger than needed.

    A pack that was stopped goes on where it was when it is started again.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Folder of the images."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Folder for the packed ones."""
    max_side: int = 400
    """Pixels of the longer side, at most. A smaller JPEG is kept byte for byte."""
    quality: int = 90
    """Of JPEG, for all others."""
    workers: int = _CORES
    """Threads; as many as cores, if left out."""
    shard_mb: float = 256.0
    """MiB of a file, about."""


@dataclass(frozen=True)
class Verify:
    """Read every image of a folder, packed or not; exit with 1 if one is damaged."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Of train, val and test, or one of them."""
    workers: int = _CORES
    """Threads; as many as cores, if left out."""


@dataclass(frozen=True)
class Stats:
    """Tell how many images a folder holds, packed or not, their sizes, and their mean and deviation."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Of train, val and test, or one of them."""
    most: int = 2000
    """Images of a split to look at, evenly spread."""
    workers: int = _CORES
    """Threads; as many as cores, if left out."""


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

    command: Annotated[
        Annotated[Pack, tyro.conf.subcommand("pack", prefix_name=False)]
        | Annotated[Verify, tyro.conf.subcommand("verify", prefix_name=False)]
        | Annotated[Stats, tyro.conf.subcommand("stats", prefix_name=False)]
        | Annotated[Download, tyro.conf.subcommand("download", prefix_name=False)],
        tyro.conf.arg(name=""),
    ]


@contextmanager
def _show_progress() -> Iterator[ReportProgress]:
    """Shows a bar for all that is told of; without a terminal, a line now and then."""
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


def _format_packed(folder: Path, index: Index) -> list[str]:
    """Returns the lines on a packed split: those images that are not in it, and a summary."""
    left_out = [left for shard in index.shards for left in shard.left_out]
    lines = [f"left out: {printable(left.name)}: {printable(left.reason)}" for left in left_out]
    size = sum(shard.size_bytes for shard in index.shards) / 1e6
    return [
        *lines,
        f"{folder}: {index.examples:,} images of {len(index.classes):,} classes in {len(index.shards)} shards, "
        f"{size:,.1f} MB; {len(left_out)} left out",
    ]


def _do(given: Pack | Verify | Stats | Download) -> tuple[str, bool]:
    """Returns what a command has to say, and whether all is well."""
    with _show_progress() as report:
        if isinstance(given, Pack):
            how = How(given.max_side, given.quality, given.shard_mb, given.workers)
            packed = pack(given.source, given.target, how, report)
            lines = [_format_packed(given.target / name, index) for name, index in packed.items()]
            return "\n".join(line for part in lines for line in part), True
        if isinstance(given, Verify):
            return verify(given.folder, given.workers, report)
        if isinstance(given, Stats):
            return describe_folder(given.folder, given.most, given.workers, report), True
        return download(given.name, given.target, given.mirror, report), True


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code: 0, 1 if something is damaged, 2 for a mistake, 130 if stopped."""
    sound = True

    def do(options: DataOptions) -> str:
        nonlocal sound
        said, sound = _do(options.command)
        return said

    try:
        return run_command("python -m trjax.data", DataOptions, do, arguments) or int(not sound)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; pack and download go on where they were when they are started again")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
