"""Figures that more than one command draws."""

from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from trjax.audit.report import Report
from trjax.audit.timeline import Span

PHASES = {"forward": "#9ecae1", "backward": "#3182bd", "update and the rest": "#bdbdbd"}
"""Colors of the parts of a step, in order."""
_EXPOSED = "#d62728"
_COMPUTE, _LINK = 1.0, 0.0


def phase_of(span: Span) -> str:
    """Returns the part of the step that a kernel belongs to, by where in the program it comes from."""
    source = span.operation.source
    if "transpose(" in source:
        return "backward"
    return "forward" if "jvp(" in source else "update and the rest"


def _draw_lanes(axes: Axes, report: Report, colors: dict[str, tuple[float, ...]]) -> None:
    for phase, shade in PHASES.items():
        bars = [(span.start * 1e3, span.seconds * 1e3) for span in report.timeline.kernels if phase_of(span) == phase]
        axes.broken_barh(bars, (_COMPUTE - 0.35, 0.7), facecolors=shade)
    for collective, communication in zip(report.collectives, report.timeline.communications, strict=True):
        span, color = communication.span, colors[collective.group]
        axes.broken_barh([(span.start * 1e3, span.seconds * 1e3)], (_LINK - 0.35, 0.7), facecolors=color)
        if communication.exposed > 0:
            waiting = [((span.end - communication.exposed) * 1e3, communication.exposed * 1e3)]
            axes.broken_barh(waiting, (_COMPUTE - 0.35, 0.7), facecolors="white", edgecolors=_EXPOSED, hatch="////")
    axes.set_yticks([_COMPUTE, _LINK], ["compute", "communication"])
    axes.set_ylim(-0.6, 1.6)


def make_timeline(title: str, report: Report) -> Figure:
    """Draws a replayed step as two lanes, and below it once more the part in which it communicates.

    Args:
        title: what was compiled for what.
        report: of the program.
    """
    spans = [communication.span for communication in report.timeline.communications]
    step_ms = report.timeline.step_seconds * 1e3
    names = list(dict.fromkeys(collective.group for collective in report.collectives))
    colors = dict(zip(names, colormaps["Dark2"].colors * len(names), strict=False))  # type: ignore[attr-defined]
    first, last = (spans[0].start * 1e3, spans[-1].end * 1e3) if spans else (0.0, step_ms)
    zoomed = bool(spans) and last - first < 0.5 * step_ms
    figure = Figure(figsize=(11, 4.6 if zoomed else 2.9), layout="constrained")
    panels = list(figure.subplots(1 + zoomed, 1, squeeze=False)[:, 0])
    for axes in panels:
        _draw_lanes(axes, report, colors)
    panels[0].set(title=title, xlim=(0, step_ms * 1.005))
    if zoomed:
        margin = 0.1 * (last - first)
        panels[1].set(xlim=(max(0, first - margin), min(step_ms * 1.005, last + margin)))
        panels[1].set_title("the part that communicates", fontsize="medium", loc="left")
    panels[-1].set(xlabel="predicted time from the start of the step (ms)")
    legend = [Patch(color=color, label=name) for name, color in (*PHASES.items(), *colors.items())]
    exposed = f"exposed: {report.timeline.exposed_seconds * 1e3:.2f} ms"
    legend.append(Patch(facecolor="white", edgecolor=_EXPOSED, hatch="////", label=exposed))
    figure.legend(handles=legend, loc="outside lower center", ncols=min(len(legend), 7))
    return figure


def draw_timeline(path: str | Path, title: str, report: Report) -> None:
    """Writes the picture of a replayed step.

    Args:
        path: of the picture; the ending names the format.
        title: what was compiled for what.
        report: of the program.

    Raises:
        OSError: the file cannot be written.
        ValueError: its ending names no format.
    """
    make_timeline(title, report).savefig(path, dpi=150)
