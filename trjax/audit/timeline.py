"""A compiled program replayed on two lanes: what overlaps with what, and what is left exposed.

The model: one stream computes, one communicates, each in the order of issue. `cost.kernels.predict_kernel` gives the
time of a kernel. A collective starts when the compute stream has reached its start and the collectives
before it are done; the compute stream waits at its end, and that wait is the exposed time. A blocking collective
is waited for at once. One that queues after another is charged for the wait too. Streams do not slow each other
down, and caches keep nothing from one kernel to the next.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trjax.xla.operations import Operation

OperationCost = Callable[[Operation], float]
"""Seconds of an operation, whatever else runs."""


@dataclass(frozen=True)
class Span:
    """An operation on its lane, in seconds from the start of the step."""

    operation: Operation
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start


@dataclass(frozen=True)
class Communication:
    """A collective on the timeline.

    Attributes:
        span: on the communication lane.
        ready: when the last operation that it depends on is done.
        overlapped: kernels that run between its start and its end in the program.
        exposed: seconds that the compute stream waits for it.
    """

    span: Span
    ready: float
    overlapped: tuple[Span, ...]
    exposed: float

    @property
    def blocking(self) -> bool:
        """Nothing at all is issued between its start and its end; a small kernel hides little, see `exposed`."""
        return not self.overlapped


@dataclass(frozen=True)
class Timeline:
    """A replayed step.

    Attributes:
        kernels: the compute lane.
        communications: the communication lane.
        step_seconds: from the first kernel to the end of both lanes.
        bound_seconds: exposed time that no other schedule of the same operations can avoid.
    """

    kernels: tuple[Span, ...]
    communications: tuple[Communication, ...]
    step_seconds: float
    bound_seconds: float

    @property
    def compute_seconds(self) -> float:
        """Time of all kernels."""
        return sum(span.seconds for span in self.kernels)

    @property
    def communication_seconds(self) -> float:
        """Time of all collectives."""
        return sum(communication.span.seconds for communication in self.communications)

    @property
    def exposed_seconds(self) -> float:
        """Time in which only communication runs."""
        return sum(communication.exposed for communication in self.communications)


def replay(operations: Sequence[Operation], cost: OperationCost) -> Timeline:
    """Replays a program, see the module's text for the model.

    Args:
        operations: in the order of issue.
        cost: seconds of each operation.
    """
    compute, link = 0.0, 0.0
    ends: dict[str, float] = {}
    open_spans: dict[str, tuple[Span, float, int]] = {}
    kernels: list[Span] = []
    communications: list[Communication] = []

    def finish(name: str) -> None:
        nonlocal compute
        span, ready, issued = open_spans.pop(name)
        exposed = max(0.0, span.end - compute)
        compute += exposed
        communications.append(Communication(span, ready, tuple(kernels[issued:]), exposed))

    for operation in operations:
        ready = max((ends[name] for name in operation.depends_on if name in ends), default=0.0)
        if operation.collective:
            start = max(compute, link)
            link = start + cost(operation)
            open_spans[operation.name] = Span(operation, start, link), ready, len(kernels)
            if operation.kind == "blocking":
                finish(operation.name)
        elif operation.kind == "done":
            for name in operation.depends_on:
                if name in open_spans:
                    finish(name)
        else:
            kernels.append(Span(operation, compute, compute + cost(operation)))
            compute = kernels[-1].end
        ends[operation.name] = compute
    for name in tuple(open_spans):
        finish(name)
    communications.sort(key=lambda communication: communication.span.start)
    return Timeline(tuple(kernels), tuple(communications), compute, _bound(operations, cost))


def _members(bits: int) -> Iterator[int]:
    """Yields the places of the bits that are set."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _reach(operations: Sequence[Operation]) -> tuple[list[int], list[int]]:
    """Returns for each operation those that it needs and those that need it, itself included, as bits of a number."""
    place = {operation.name: index for index, operation in enumerate(operations)}
    needs = [1 << index for index in range(len(operations))]
    needed_by = needs.copy()
    for index, operation in enumerate(operations):
        for name in operation.depends_on:
            needs[index] |= needs[place[name]] if name in place else 0
    for index in reversed(range(len(operations))):
        for name in operations[index].depends_on:
            if name in place:
                needed_by[place[name]] |= needed_by[index]
    return needs, needed_by


def _bound(operations: Sequence[Operation], cost: OperationCost) -> float:
    """Returns the exposed time that the dependencies force, with the collectives in the order of issue.

    A run of collectives, from the i-th to the k-th, cannot begin before the kernels that the i-th needs are done,
    nor end after those begin that need the k-th; and while they run, only kernels can run that one of them neither
    needs nor is needed by. What these cannot fill is exposed. Runs one after the other add up.
    """
    needs, needed_by = _reach(operations)
    seconds = [0.0 if operation.collective or operation.kind == "done" else cost(operation) for operation in operations]
    everything, compute = (1 << len(operations)) - 1, sum(seconds)
    collectives = [index for index, operation in enumerate(operations) if operation.collective]
    before = [sum(seconds[other] for other in _members(needs[index])) for index in collectives]
    after = [sum(seconds[other] for other in _members(needed_by[index])) for index in collectives]
    best = [0.0] * (len(collectives) + 1)  # best[k]: forced by the first k collectives
    for first in range(len(collectives)):
        transfer, filled, beside = 0.0, 0.0, 0
        for last in range(first, len(collectives)):
            index = collectives[last]
            transfer += cost(operations[index])
            fresh = everything & ~(needs[index] | needed_by[index] | beside)
            filled += sum(seconds[other] for other in _members(fresh))
            beside |= fresh
            room = min(filled, compute - before[first] - after[last])
            best[last + 1] = max(best[last + 1], best[last], best[first] + transfer - room)
    return best[-1]
