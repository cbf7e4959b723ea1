"""A compiled program in numbers: every collective, what it costs and overlaps with, memory traffic, launches.

The kernels are those that the compiler chose without the device. Autotuning and a pass that orders collectives on
the device may change them, but not the order that the dependencies force.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trjax.audit.gradients import find_copies, find_offsets
from trjax.audit.rules import Verdict
from trjax.audit.timeline import Communication, Timeline, replay
from trjax.cost.collectives import predict_collective
from trjax.cost.kernels import predict_kernel
from trjax.cost.machines import Machine
from trjax.xla.compiled import Compiled
from trjax.xla.operations import Operation


@dataclass(frozen=True)
class Collective:
    """One collective of the step. Times in milliseconds from its start.

    Attributes:
        group: of arrays, as `Labels.group_of` names it.
        collective: its opcode, `all-reduce` for instance.
        reduces: what lies in the group.
        bytes: that each device hands in.
        dtype: in which.
        blocking: the kernels after it wait, whatever they need.
        ready_ms: when what it reduces is complete.
        start_ms: when it starts.
        comm_ms: how long it takes.
        exposed_ms: how long the kernels wait for it.
        overlapped_with: `convolutions` and other `kernels` issued while it runs, and their `ms`.
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
    overlapped_with: dict[str, float]


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
class Labels:
    """What the author of a program knows about its collectives, and the compiled program does not say.

    Attributes:
        group_of: names the group of arrays that a collective works on; by default its opcode.
        gathers: tells whether the arrays of a collective are gathered into a buffer for it, as gradients are.
        contents: what each group holds, in words.
        offsets_bytes: where the buffers that are gathered should lie in their allocation; None if anywhere.
    """

    group_of: Callable[[Operation], str] = lambda operation: operation.collective
    gathers: Callable[[Operation], bool] = lambda operation: True
    contents: Mapping[str, str] = field(default_factory=dict)
    offsets_bytes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Report:
    """All that is known of a compiled program; `verdicts` are those of its author's rules, if there are any."""

    collectives: tuple[Collective, ...]
    summary: Summary
    timeline: Timeline
    verdicts: tuple[Verdict, ...] = ()

    @property
    def ok(self) -> bool:
        """No rule is broken."""
        return all(verdict.ok for verdict in self.verdicts)


def _describe(communication: Communication, labels: Labels) -> Collective:
    operation, span = communication.span.operation, communication.span
    group = labels.group_of(operation)
    convolutions = sum(kernel.operation.kind == "convolution" for kernel in communication.overlapped)
    return Collective(
        group=group,
        collective=operation.collective,
        reduces=labels.contents.get(group, ""),
        bytes=operation.size_bytes,
        dtype=operation.dtype,
        blocking=communication.blocking,
        ready_ms=communication.ready * 1e3,
        start_ms=span.start * 1e3,
        comm_ms=span.seconds * 1e3,
        exposed_ms=communication.exposed * 1e3,
        overlapped_with={
            "convolutions": convolutions,
            "kernels": len(communication.overlapped) - convolutions,
            "ms": sum(kernel.seconds for kernel in communication.overlapped) * 1e3,
        },
    )


def _summarise(compiled: Compiled, timeline: Timeline, labels: Labels, machine: Machine, global_batch: int) -> Summary:
    kernels = [span.operation for span in timeline.kernels]
    gathered = [found for found in compiled.operations if found.collective and labels.gathers(found)]
    offsets = find_offsets(compiled.buffers, gathered) if labels.offsets_bytes is not None else None
    gradient_transposes, gather_copy_bytes = find_copies(compiled.operations, labels.gathers)
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
        contiguous=None if offsets is None else offsets == labels.offsets_bytes,
        offsets_bytes=offsets or (),
        graphs=compiled.graphs,
        graph_launches=compiled.graph_launches,
        launches=compiled.launches,
    )


def analyze(compiled: Compiled, machine: Machine, global_batch: int, labels: Labels = Labels()) -> Report:
    """Replays a compiled program on a machine.

    Args:
        compiled: the program.
        machine: what it is to run on.
        global_batch: examples over all devices.
        labels: what its author knows about its collectives.
    """

    def cost(operation: Operation) -> float:
        if operation.collective:
            return predict_collective(operation.collective, operation.size_bytes, machine, operation.groups)
        size_bytes = operation.read_bytes + operation.written_bytes
        return predict_kernel(size_bytes, operation.flops, operation.dtype, machine.target)

    timeline = replay(compiled.operations, cost)
    collectives = tuple(_describe(communication, labels) for communication in timeline.communications)
    return Report(collectives, _summarise(compiled, timeline, labels, machine, global_batch), timeline)
