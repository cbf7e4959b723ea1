"""Replays worked by hand; seconds are whole numbers."""

from typing import Any

import pytest

from trjax.audit.timeline import replay
from trjax.xla.operations import Operation, OperationKind

pytestmark = pytest.mark.fast


def operation(name: str, kind: OperationKind, seconds: float, *depends_on: str) -> Operation:
    collective = "all-reduce" if kind in ("start", "blocking") else ""
    return Operation(name, kind, "", 0, 0, seconds, "f32", depends_on, collective=collective)


def replayed(*operations: Operation) -> Any:
    return replay(operations, lambda operation: operation.flops)


def test_overlapped_with_what_is_issued_meanwhile() -> None:
    found = replayed(
        operation("a", "convolution", 2),
        operation("s", "start", 3, "a"),
        operation("b", "convolution", 4),
        operation("d", "done", 0, "s"),
        operation("c", "kernel", 1, "d"),
    )
    (communication,) = found.communications
    assert (communication.ready, communication.span.start, communication.span.end) == (2, 2, 5)
    assert [span.operation.name for span in communication.overlapped] == ["b"]
    assert (communication.exposed, communication.blocking) == (0, False)
    assert (found.step_seconds, found.compute_seconds, found.communication_seconds) == (7, 7, 3)
    assert (found.exposed_seconds, found.bound_seconds) == (0, 0)


def test_what_is_not_hidden_is_exposed() -> None:
    found = replayed(
        operation("a", "convolution", 2),
        operation("s", "start", 10, "a"),
        operation("b", "convolution", 4),
        operation("d", "done", 0, "s"),
        operation("c", "kernel", 1, "d"),
    )
    assert found.communications[0].exposed == 6
    assert found.step_seconds == 2 + 10 + 1
    assert found.bound_seconds == 6  # a before, c after, b beside: 13 is the least


def test_a_collective_waited_for_at_once_blocks_and_another_order_would_not() -> None:
    found = replayed(
        operation("a", "convolution", 2),
        operation("s", "start", 3, "a"),
        operation("d", "done", 0, "s"),
        operation("b", "convolution", 4),
        operation("c", "kernel", 1, "d"),
    )
    assert found.communications[0].blocking
    assert found.exposed_seconds == 3
    assert found.bound_seconds == 0


def test_a_collective_without_an_end_of_its_own_blocks() -> None:
    found = replayed(operation("a", "kernel", 1), operation("r", "blocking", 2, "a"), operation("b", "kernel", 1))
    assert found.communications[0].blocking
    assert (found.step_seconds, found.exposed_seconds) == (4, 2)


def test_one_link_takes_one_collective_at_a_time() -> None:
    found = replayed(
        operation("a", "kernel", 1),
        operation("s1", "start", 5, "a"),
        operation("b", "kernel", 1),
        operation("s2", "start", 5, "b"),
        operation("c", "kernel", 1),
        operation("d1", "done", 0, "s1"),
        operation("d2", "done", 0, "s2"),
    )
    first, second = found.communications
    assert (second.ready, second.span.start, second.span.end) == (2, 6, 11)
    assert (first.exposed, second.exposed) == (3, 5)
    assert found.step_seconds == 11
    assert found.bound_seconds == 11 - 3


def test_bound_adds_up_over_a_chain_that_nothing_runs_beside() -> None:
    found = replayed(
        operation("a", "kernel", 1),
        operation("r1", "blocking", 2, "a"),
        operation("b", "kernel", 10, "r1"),
        operation("r2", "blocking", 3, "b"),
        operation("c", "kernel", 1, "r2"),
    )
    assert found.exposed_seconds == found.bound_seconds == 5


def test_what_can_run_beside_several_fills_only_once() -> None:
    found = replayed(
        operation("beside", "kernel", 1),
        operation("a", "kernel", 1),
        operation("r1", "blocking", 2, "a"),
        operation("b", "kernel", 10, "r1"),
        operation("r2", "blocking", 3, "b"),
        operation("c", "kernel", 1, "r2"),
    )
    assert (found.exposed_seconds, found.bound_seconds) == (5, 4)


def test_no_collective() -> None:
    found = replayed(operation("a", "kernel", 1), operation("b", "kernel", 2, "a"))
    assert (found.step_seconds, found.exposed_seconds, found.bound_seconds, found.communications) == (3, 0, 0, ())
