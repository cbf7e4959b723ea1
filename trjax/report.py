"""`python -m trjax.report RUN ...`: the results of one run, or of several, on one page."""

import csv
import html
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro
from matplotlib import colormaps
from matplotlib.figure import Figure

from trjax.audit.figures import make_timeline
from trjax.commands import run_command
from trjax.config.run import Config
from trjax.explain.step import StepOptions, examine, format_report
from trjax.run.records import Record, read_metrics
from trjax.run.workdir import flat_options, read_config

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .25rem .7rem; border-bottom: 1px solid #ddd; }
th { text-align: left; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { overflow-x: auto; background: #f6f6f6; padding: .8rem; font-size: 12px; } svg { max-width: 100%; height: auto; }
"""
_LINES = {"train": "-", "test": "--", "ema": ":"}
_PANELS = [("loss", 1, "loss"), ("top1", 100, "top-1 (%)")]
_PANELS += [("images_per_second", 1, "training images/s"), ("learning_rate", 1, "learning rate")]


@dataclass(frozen=True)
class ReportOptions:
    """Write a page about one run, or several side by side: curves, throughput, options, what the step compiles to."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of the runs."""
    out: str = ""
    """File to write; empty: report.html in the first run's folder."""
    csv: str = ""
    """CSV file to write all records of all runs to; empty: none."""
    target: str = "h100"
    """GPU to compile each run's step for: a100, h100, h200 or b200; empty: trjax compiles nothing."""
    topology: str = "1x8"
    """Hosts and GPUs of each host to compile for, HOSTSxGPUS."""


@dataclass(frozen=True)
class RunRecords:
    """A run as its folder describes it.

    Attributes:
        name: its name on the page.
        config: its options.
        records: the lines of its `metrics.jsonl`.
    """

    name: str
    config: Config
    records: list[Record]

    def of(self, split: str) -> list[Record]:
        """Returns the lines of one kind."""
        return [record for record in self.records if record.split == split]


def read_run(folder: Path, name: str) -> RunRecords:
    """Reads a run's options and records.

    Raises:
        ValueError: there is no run, or it has no records.
    """
    config, records = read_config(folder), read_metrics(folder / "metrics.jsonl")
    if not records:
        raise ValueError(f"{folder} has no records yet")
    return RunRecords(name, config, records)


def name_runs(folders: Sequence[Path]) -> list[str]:
    """Returns paths without the parents that all of them share.

    >>> name_runs([Path("/a/x/run"), Path("/a/y/run")])
    ['x/run', 'y/run']
    """
    paths = [folder.resolve() for folder in folders]
    parent = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(parent)) for path in paths]


def draw_curves(runs: Sequence[RunRecords]) -> Figure:
    """Draws loss, top-1, throughput and learning rate over the steps."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    colors = colormaps["tab10"].colors  # type: ignore[attr-defined]
    for axes, (value, factor, label) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        for run, color in zip(runs, colors * len(runs), strict=False):
            for split in _LINES if value in ("loss", "top1") else ["train"]:
                if records := run.of(split):
                    points = [(record.step, factor * getattr(record, value)) for record in records]
                    name = f"{run.name}, {split}" if len(runs) > 1 else split
                    style = {"color": color, "label": name, "markersize": 3, "marker": "o" if len(points) < 30 else ""}
                    axes.plot(*zip(*points, strict=True), _LINES[split], **style)
        axes.set(xlabel="step", ylabel=label)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[2].set_ylim(bottom=0)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _to_svg(figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg")
    text = file.getvalue()
    return text[text.index("<svg") :]


def _to_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        kind = ' class="number"' if isinstance(value, int | float) else ""
        return f"<td{kind}>{html.escape(str(value))}</td>"

    top = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>\n" for row in rows)
    return f"<table>\n<tr>{top}</tr>\n{body}</table>"


def summarise(run: RunRecords) -> list[Any]:
    """Returns a run's row of the table: its progress, its results, its throughput."""
    tests, trained = run.of("test"), run.of("train")
    best = max(tests, key=lambda record: record.top1, default=None)
    speeds = sorted(record.images_per_second for record in trained)
    row = [run.name, run.config.preset, run.records[-1].epoch, run.records[-1].step]
    row += [f"{tests[-1].top1:.2%}", f"{best.top1:.2%} at {best.step}"] if best else ["", ""]
    row += [f"{trained[-1].loss:.4f}", round(speeds[len(speeds) // 2])] if trained else ["", ""]
    return [*row, sum(record.skipped for record in trained)]


def find_differences(runs: Sequence[RunRecords]) -> list[list[str]]:
    """Returns the options in which runs differ, with each one's value."""
    options = [flat_options(asdict(run.config)) for run in runs]
    rows = [[name, *(str(own[name]) for own in options)] for name in options[0]]
    return [row for row in rows if len(set(row[1:])) > 1]


def _explain(run: RunRecords, options: ReportOptions) -> str:
    """Returns what a run's step compiles to, as a part of the page; or why not."""
    title = f"<h3>{html.escape(run.name)}</h3>"
    try:
        found = examine(run.config, StepOptions(target=options.target, topology=options.topology))
    except ValueError as error:
        return f"{title}<p>{html.escape(str(error))}</p>"
    figure = _to_svg(make_timeline(found.title, found.report))
    return f"{title}{figure}<pre>{html.escape(format_report(found.report))}</pre>"


def make_page(runs: Sequence[RunRecords], options: ReportOptions) -> str:
    """Returns the page: everything it shows is in it."""
    header = ["run", "preset", "epoch", "step", "last test top-1", "best", "last loss", "images/s", "skipped"]
    parts = ["<h1>trjax</h1>", _to_table(header, [summarise(run) for run in runs]), _to_svg(draw_curves(runs))]
    if len(runs) > 1:
        parts += ["<h2>What differs</h2>", _to_table(["option", *(run.name for run in runs)], find_differences(runs))]
    if options.target:
        where = html.escape(f"{options.topology} {options.target}")
        parts += [f"<h2>What the step compiles to, for {where}</h2>", *(_explain(run, options) for run in runs)]
    body = "\n".join(parts)
    names = html.escape(", ".join(run.name for run in runs))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>trjax: {names}</title><style>{_STYLE}</style></head>
<body>
{body}
</body></html>
"""


def write_csv(path: Path, runs: Sequence[RunRecords]) -> None:
    """Writes all records of all runs, one a line."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", *(field.name for field in fields(Record))])
        writer.writerows([run.name, *asdict(record).values()] for run in runs for record in run.records)


def write_report(options: ReportOptions) -> str:
    """Writes the page, and the table if asked for, and returns where the page is.

    Raises:
        ValueError: there is no run, or it has no records.
        OSError: a file cannot be written.
    """
    if not options.runs:
        raise ValueError("name at least one run's folder")
    runs = list(map(read_run, options.runs, name_runs(options.runs)))
    path = Path(options.out) if options.out else options.runs[0] / "report.html"
    if not path.parent.is_dir():
        raise ValueError(f"{path}: its folder does not exist")
    if options.csv:
        write_csv(Path(options.csv), runs)
    path.write_text(make_page(runs, options), encoding="utf-8")
    return str(path)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code: 0, or 2 for a mistake."""
    return run_command("python -m trjax.report", ReportOptions, write_report, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
