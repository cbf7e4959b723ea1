"""A compiled step held against its plan: every collective, what it costs and hides behind, a verdict on each point.

The kernels are those that the compiler chose without the device. Autotuning and a pass that orders collectives on
the device may change them, but not the order that the dependencies force.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trjax.buffers import COMBINED, OTHER, STATISTICS, gradient_path, group_layout, group_of
from trjax.compiled import Compiled
from trjax.cost import Machine, predict_collective, predict_kernel
from trjax.operations import Operation
from trjax.plan import Plan
from trjax.planning import Expected
from trjax.timeline import Communication, Timeline, replay

TOLERANCE_MS = 0.03
"""Exposed time above what the dependencies force that is still called hidden: a few kernels."""
GATHER_SHARE = 0.01
"""Share of the gradients that may be moved once more than needed: XLA splits a concatenation of more than 128 arrays,
and with more than 60 BatchNorms in a group their vectors go through a buffer of their own."""


_MOST_LISTED = 8


@dataclass(frozen=True)
class Collective:
    """One collective of the step. Times in milliseconds from its start.

    Attributes:
        group: of the plan; `statistics` of BatchNorm, `combined` by the compiler out of several, or `other`.
        collective: its opcode, `all-reduce` for instance.
        reduces: what lies in the group.
        bytes: that each device hands in.
        dtype: in which.
        blocking: the kernels behind it wait, whatever they need.
        ready_ms: when what it reduces is complete.
        start_ms: when it starts.
        comm_ms: how long it takes.
        exposed_ms: how long the kernels wait for it.
        hidden_behind: `convolutions` and other `kernels` issued while it runs, and their `ms`.
    """

    group: str
    collective: str
    reduces: str
    bytes: int
    dtype: str
    blocking: bool
    ready_ms: float
    start_ms: float
    comm_ms: float
    exposed_ms: float
    hidden_behind: dict[str, float]


@dataclass(frozen=True)
class Summary:
    """The step in numbers; times are predicted, in milliseconds, of one device.

    Attributes:
        world_size: devices.
        all_reduces: collectives of any kind.
        blocking: of them, those that block.
        comm_ms: time of all collectives.
        exposed_ms: time in which kernels wait for collectives.
        exposed_bound_ms: the least that the dependencies allow: communication that no later compute can hide.
        exposed_gap_ms: what the schedule exposes beyond it.
        compute_ms: time of all kernels.
        step_ms: from the first kernel to the end.
        images_per_second: of all devices.
        hbm_bytes: read and written in device memory by the kernels of one device.
        hbm_bytes_per_image: the same for one example.
        temp_bytes: device memory besides arguments and results.
        kernels: kernels of one device.
        transposes: kernels that reorder dims in memory.
        gradient_transposes: of them, those between a gradient and its new parameter.
        gather_copy_bytes: written to bring gradients together, beyond the one pass that fills the buffers.
        contiguous: all gradient buffers lie in one allocation as the plan says; None where the compiler does not
            tell, or nothing is reduced.
        offsets_bytes: of the groups in their allocation.
        graphs: CUDA graphs.
        graph_launches: kernels and collectives in them.
        launches: kernels and collectives outside.
    """

    world_size: int
    all_reduces: int
    blocking: int
    comm_ms: float
    exposed_ms: float
    exposed_bound_ms: float
    exposed_gap_ms: float
    compute_ms: float
    step_ms: float
    images_per_second: float
    hbm_bytes: int
    hbm_bytes_per_image: float
    temp_bytes: int
    kernels: int
    transposes: int
    gradient_transposes: int
    gather_copy_bytes: int
    contiguous: bool | None
    offsets_bytes: tuple[int, ...]
    graphs: int
    graph_launches: int
    launches: int


@dataclass(frozen=True)
class Verdict:
    """One point: holds or not, and what was found."""

    ok: bool
    text: str


@dataclass(frozen=True)
class Audit:
    """All that is known of a compiled step."""

    collectives: tuple[Collective, ...]
    summary: Summary
    verdicts: tuple[Verdict, ...]
    timeline: Timeline

    @property
    def ok(self) -> bool:
        """Every verdict is."""
        return all(verdict.ok for verdict in self.verdicts)


def _contents(plan: Plan | None) -> dict[str, str]:
    """Returns what each group reduces, in words."""
    found = {STATISTICS: "moments of a BatchNorm", COMBINED: "several, merged by the compiler", OTHER: "not planned"}
    for group in plan.groups if plan else ():
        kinds = Counter(region.kind.value[:2] for region in group.regions)
        words = [f"{kinds['G_']} gradients"] * bool(kinds["G_"])
        words += ["results"] * kinds["R_"] + [f"{kinds['B_']} statistics"] * bool(kinds["B_"])
        found[group.name] = ", ".join(words)
    return found


def _describe(communication: Communication, contents: dict[str, str]) -> Collective:
    operation, span = communication.span.operation, communication.span
    group = group_of(operation)
    convolutions = sum(kernel.operation.kind == "convolution" for kernel in communication.behind)
    hidden = {
        "convolutions": convolutions,
        "kernels": len(communication.behind) - convolutions,
        "ms": sum(kernel.seconds for kernel in communication.behind) * 1e3,
    }
    return Collective(
        group, operation.collective, contents.get(group, ""), operation.size_bytes, operation.dtype,
        communication.blocking, communication.ready * 1e3, span.start * 1e3, span.seconds * 1e3,
        communication.exposed * 1e3, hidden,
    )  # fmt: skip


def _summarise(
    compiled: Compiled, timeline: Timeline, plan: Plan | None, machine: Machine, global_batch: int
) -> Summary:
    kernels = [span.operation for span in timeline.kernels]
    contiguous, offsets = group_layout(compiled, plan) if plan else (None, ())
    gradient_transposes, gather_copy_bytes = gradient_path(compiled.operations)
    hbm_bytes = sum(kernel.read_bytes + kernel.written_bytes for kernel in kernels)
    return Summary(
        world_size=machine.topology.world_size,
        all_reduces=len(timeline.communications),
        blocking=sum(communication.blocking for communication in timeline.communications),
        comm_ms=timeline.communication_seconds * 1e3,
        exposed_ms=timeline.exposed_seconds * 1e3,
        exposed_bound_ms=timeline.bound_seconds * 1e3,
        exposed_gap_ms=max(0.0, timeline.exposed_seconds - timeline.bound_seconds) * 1e3,
        compute_ms=timeline.compute_seconds * 1e3,
        step_ms=timeline.step_seconds * 1e3,
        images_per_second=global_batch / timeline.step_seconds,
        hbm_bytes=hbm_bytes,
        hbm_bytes_per_image=hbm_bytes * machine.topology.world_size / global_batch,
        temp_bytes=compiled.temp_bytes,
        kernels=len(kernels),
        transposes=sum(kernel.transposes for kernel in kernels),
        gradient_transposes=gradient_transposes,
        gather_copy_bytes=gather_copy_bytes,
        contiguous=contiguous,
        offsets_bytes=offsets,
        graphs=compiled.graphs,
        graph_launches=compiled.graph_launches,
        launches=compiled.launches,
    )


def _list_calls(calls: Counter[tuple[str, str, int]]) -> str:
    """Returns collectives in words; of many, how many."""
    if len(calls) > _MOST_LISTED:
        size_bytes = sum(size * count for (_, _, size), count in calls.items())
        return f"{calls.total()} of {size_bytes:,} bytes"
    words = []
    for (group, collective, size_bytes), count in calls.items():
        how_often = f"{count} x " if count > 1 else ""
        words.append(f"{group} {how_often}{'' if collective == 'all-reduce' else collective + ' '}{size_bytes:,} bytes")
    return ", ".join(words) or "none"


def _judge(
    collectives: Sequence[Collective], summary: Summary, expected: Expected, dropped: Sequence[str]
) -> Iterator[Verdict]:
    """Yields a verdict on each point that the plan and the recipe promise."""
    groups = [collective for collective in collectives if collective.group not in (STATISTICS, OTHER)]
    found = Counter((group.group, group.collective, group.bytes) for group in groups)
    text = f"collectives are those of the plan: {_list_calls(found)}"
    # On a CPU a single device keeps trivial ones.
    as_planned = found == expected.groups or summary.world_size == 1
    yield Verdict(as_planned, text if as_planned else f"{text}; planned: {_list_calls(expected.groups)}")
    others = Counter(collective.bytes for collective in collectives if collective not in groups)
    yield Verdict(
        others == expected.others or summary.world_size == 1,
        f"others: {others.total()}, {expected.others.total()} of BatchNorm's and of norms expected",
    )
    blocking = Counter(group.group for group in groups if group.blocking)
    names = list(blocking) if len(blocking) <= _MOST_LISTED else [f"{len(blocking)} of them"]
    yield Verdict(not blocking, f"blocking groups: {', '.join(names) or 'none'}")
    exposed = sum(group.exposed_ms for group in groups)
    # What the dependencies force and the statistics do not account for, the groups may.
    allowed = max(0.0, summary.exposed_bound_ms - (summary.exposed_ms - exposed)) + TOLERANCE_MS
    yield Verdict(exposed <= allowed, f"groups exposed: {exposed:.3f} ms, at most {allowed:.3f}")
    yield Verdict(summary.gradient_transposes == 0, f"transposes of gradients: {summary.gradient_transposes}")
    allowed_bytes = int(GATHER_SHARE * sum(group.size_bytes for group in expected.plan.groups))
    gathered = f"copies to gather gradients: {summary.gather_copy_bytes:,} bytes, at most {allowed_bytes:,}"
    yield Verdict(summary.gather_copy_bytes <= allowed_bytes, gathered)
    if summary.contiguous is not None:
        offsets = ", ".join(f"{offset:,}" for offset in summary.offsets_bytes) or "not in place"
        yield Verdict(summary.contiguous, f"one allocation, at the plan's offsets: {offsets}")
    yield Verdict(not dropped, f"compile options dropped: {', '.join(dropped) or 'none'}")


def audit(
    compiled: Compiled,
    machine: Machine,
    global_batch: int,
    expected: Expected | None = None,
    dropped: Sequence[str] = (),
) -> Audit:
    """Replays a compiled step on a machine, and holds it against its plan.

    Args:
        compiled: the step.
        machine: what it is to run on.
        global_batch: examples over all devices.
        expected: its plan, and the collectives that it should hold, `planning.expect`; without, nothing is judged.
        dropped: compile options that the compiler did not know.
    """

    def cost(operation: Operation) -> float:
        if operation.collective:
            return predict_collective(operation.collective, operation.size_bytes, machine, operation.groups)
        size_bytes = operation.read_bytes + operation.written_bytes
        return predict_kernel(size_bytes, operation.flops, operation.dtype, machine.target)

    plan = expected.plan if expected else None
    timeline = replay(compiled.operations, cost)
    contents = _contents(plan)
    collectives = tuple(_describe(communication, contents) for communication in timeline.communications)
    summary = _summarise(compiled, timeline, plan, machine, global_batch)
    verdicts = tuple(_judge(collectives, summary, expected, dropped)) if expected else ()
    return Audit(collectives, summary, verdicts, timeline)
