"""Progress on the console."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from trjax.run.records import Record


@dataclass(frozen=True)
class Display:
    """A progress bar on a terminal; elsewhere plain lines, one a record."""

    console: Console
    progress: Progress
    task: TaskID
    num_epochs: int

    def say(self, text: str, console: Console | None = None) -> None:
        """Prints a line above the bar, or on another console."""
        with suppress(SystemExit):  # rich's answer to a closed pipe; the run goes on without a reader
            (console or self.console).print(text, highlight=False, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Prints a line of what this process alone has seen, also if others are to speak for it."""
        self.say(text, Console() if self.console.quiet else None)

    def advance(self, step: int, epoch: int, results: np.ndarray, images_per_second: float) -> None:
        """Moves the bar to `step`, with the results of one batch, shape (4,)."""
        loss, top1, _, count = (float(value) for value in results)
        text = f"loss {loss / max(count, 1):.4f} top-1 {top1 / max(count, 1):.1%} {images_per_second:,.0f} images/s"
        self.progress.update(self.task, completed=step, epoch=epoch, numbers=text)

    def record(self, record: Record) -> None:
        """Prints a record."""
        where = f"epoch {record.epoch}/{self.num_epochs}  step {record.step}  {record.split:5}"
        numbers = f"loss {record.loss:.4f}  top-1 {record.top1:7.2%}  {record.images_per_second:,.0f} images/s"
        seconds = record.examples / max(record.images_per_second, 1e-9)
        late = f"  input {record.input_seconds / seconds:.0%}" if record.input_seconds > 0.05 * seconds > 0 else ""
        self.say(f"{where}  {numbers}{late}")
        if not math.isfinite(record.loss):
            self.say(f"warning: the loss is not finite at step {record.step}; try a lower --optim.learning-rate")
        if record.skipped:
            self.say(f"warning: {record.skipped} steps up to step {record.step} had gradients that are not finite")


@contextmanager
def open_display(num_epochs: int, steps_per_epoch: int, start_step: int, quiet: bool = False) -> Iterator[Display]:
    """Shows the progress of a run, from `start_step` on, while the context lasts; `quiet`: only what it warns of."""
    console = Console(quiet=quiet)
    columns = (
        TextColumn("epoch {task.fields[epoch]}/" + str(num_epochs)),
        BarColumn(bar_width=10),  # all of it fits in 80 columns
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        total, epoch = num_epochs * steps_per_epoch, start_step // steps_per_epoch + 1
        task = progress.add_task("train", total=total, completed=start_step, epoch=epoch, numbers="compiling")
        yield Display(console, progress, task, num_epochs)
