"""The trainer's own rules: a compiled step compared with its plan, a verdict on each point that the plan promises."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trjax.audit.report import Collective, Labels, Report, analyze
from trjax.audit.rules import (
    MOST_LISTED,
    Verdict,
    judge_blocking,
    judge_copies,
    judge_exposed,
    judge_transposes,
)
from trjax.cost.machines import Machine
from trjax.step.expected import Expected
from trjax.step.plan import Plan
from trjax.xla.compiled import Compiled
from trjax.xla.operations import Operation

GATHER_SHARE = 0.01
"""Share of the gradients that may be moved once more than needed: XLA splits a concatenation of more than 128 arrays,
and with more than 60 BatchNorms in a group their vectors go through a buffer of their own."""
STATISTICS, COMBINED, OTHER = "statistics", "combined", "other"
"""Groups of collectives that the plan does not name."""


def group_of(operation: Operation) -> str:
    """Returns the group that a collective reduces, by the scope that the staged backward gives it."""
    if found := re.search(r"all_reduce_(\w+)/", operation.source):
        return found.group(1)
    if not operation.source:  # the compiler has merged several, and dropped where they come from
        return COMBINED
    return STATISTICS if "norm" in operation.source.lower() else OTHER


def _in_plan(group: str) -> bool:
    return group not in (STATISTICS, OTHER)


def _contents(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields each group of a plan with its contents in words."""
    for group in plan.groups:
        kinds = Counter(region.kind.value[:2] for region in group.regions)
        words = [f"{kinds['G_']} gradients"] * bool(kinds["G_"])
        words += ["results"] * kinds["R_"] + [f"{kinds['B_']} statistics"] * bool(kinds["B_"])
        yield group.name, ", ".join(words)


def label_step(plan: Plan | None) -> Labels:
    """Returns what the trainer knows about the collectives of a step.

    Args:
        plan: where the step's gradients lie; None for a program that is not trjax's.
    """
    contents = {STATISTICS: "moments of a BatchNorm", COMBINED: "several, merged by the compiler", OTHER: "not planned"}
    return Labels(
        group_of=group_of,
        gathers=lambda operation: _in_plan(group_of(operation)),
        contents=contents | dict(_contents(plan)) if plan else contents,
        offsets_bytes=plan.offsets_bytes if plan else None,
    )


def _list_calls(calls: Counter[tuple[str, str, int]]) -> str:
    """Returns collectives in words; of many, how many."""
    if len(calls) > MOST_LISTED:
        size_bytes = sum(size * count for (_, _, size), count in calls.items())
        return f"{calls.total()} of {size_bytes:,} bytes"
    words = []
    for (group, collective, size_bytes), count in calls.items():
        how_often = f"{count} x " if count > 1 else ""
        words.append(f"{group} {how_often}{'' if collective == 'all-reduce' else collective + ' '}{size_bytes:,} bytes")
    return ", ".join(words) or "none"


def _judge_calls(groups: Sequence[Collective], others: Sequence[Collective], expected: Expected) -> Iterator[Verdict]:
    found = Counter((group.group, group.collective, group.bytes) for group in groups)
    text = f"collectives are those of the plan: {_list_calls(found)}"
    as_planned = found == expected.groups
    yield Verdict("collectives", as_planned, text if as_planned else f"{text}; planned: {_list_calls(expected.groups)}")
    sizes = Counter(collective.bytes for collective in others)
    text = f"others: {sizes.total()}, {expected.others.total()} of BatchNorm's and of norms expected"
    yield Verdict("others", sizes == expected.others, text)


def judge_step(report: Report, expected: Expected, dropped: Sequence[str] = ()) -> Iterator[Verdict]:
    """Yields a verdict on each point that the plan promises.

    Args:
        report: of the compiled step.
        expected: its plan, and the collectives that it should hold.
        dropped: compile options that the compiler did not know.
    """
    summary = report.summary
    groups = [collective for collective in report.collectives if _in_plan(collective.group)]
    others = [collective for collective in report.collectives if not _in_plan(collective.group)]
    calls = _judge_calls(groups, others, expected)
    # On a CPU a single device keeps trivial collectives, which nobody plans.
    yield from calls if summary.world_size > 1 else (replace(verdict, ok=True) for verdict in calls)
    yield judge_blocking(group.group for group in groups if group.blocking)
    exposed_ms = sum(group.exposed_ms for group in groups)
    # The statistics account for a part of what the dependencies force; the groups may account for the rest.
    yield judge_exposed(exposed_ms, summary.exposed_bound_ms - (summary.exposed_ms - exposed_ms))
    yield judge_transposes(summary.gradient_transposes)
    gradient_bytes = sum(group.size_bytes for group in expected.plan.groups)
    yield judge_copies(summary.gather_copy_bytes, int(GATHER_SHARE * gradient_bytes))
    if summary.contiguous is not None:
        offsets = ", ".join(f"{offset:,}" for offset in summary.offsets_bytes) or "not in place"
        yield Verdict("one allocation", summary.contiguous, f"one allocation, at the plan's offsets: {offsets}")
    yield Verdict("options", not dropped, f"compile options dropped: {', '.join(dropped) or 'none'}")


def analyze_step(
    compiled: Compiled,
    machine: Machine,
    global_batch: int,
    expected: Expected | None = None,
    dropped: Sequence[str] = (),
) -> Report:
    """Replays a compiled step on a machine, and judges it by its plan.

    Args:
        compiled: the step.
        machine: what it is to run on.
        global_batch: examples over all devices.
        expected: its plan and collectives, `expected.expect`; None: there are no verdicts.
        dropped: compile options that the compiler did not know.
    """
    report = analyze(compiled, machine, global_batch, label_step(expected.plan if expected else None))
    return replace(report, verdicts=tuple(judge_step(report, expected, dropped))) if expected else report
