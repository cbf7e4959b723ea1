"""The assertions of `trjax.testing`, on programs worked by hand; each has a program that breaks it."""

import pytest

from trjax.audit.report import Report, analyze
from trjax.cost.algorithms import Link
from trjax.cost.machines import Machine, Topology
from trjax.cost.targets import TARGETS
from trjax.testing import assert_collectives, assert_exposed, assert_no_blocking
from trjax.xla.compiled import Compiled
from trjax.xla.operations import Operation

pytestmark = pytest.mark.fast


def report(*, blocks: bool) -> Report:
    """An AllReduce of 1 MB over a link of 1 GB/s, and a kernel of some 4 ms, which runs beside it or after it."""
    start = Operation("s", "start", "", 0, 0, 0.0, "f32", (), collective="all-reduce", size_bytes=10**6)
    done = Operation("d", "done", "", 0, 0, 0.0, "f32", ("s",))
    kernel = Operation("k", "kernel", "", 10**10, 0, 0.0, "f32", ())
    operations = (start, done, kernel) if blocks else (start, kernel, done)
    machine = Machine(TARGETS["h100"], Topology(2, 1), Link(1e9, 0.0), Link(1e9, 0.0))
    return analyze(Compiled(None, "", operations, 0, 0, ()), machine, 8)


def test_what_holds_raises_nothing() -> None:
    found = report(blocks=False)
    assert_collectives(found, {"all-reduce": 1})
    assert_no_blocking(found)
    assert_exposed(found, max_ms=0.0)


def test_what_does_not_hold_shows_the_collectives() -> None:
    found = report(blocks=True)
    with pytest.raises(AssertionError, match=r"1 of 1 collectives block\n.*\n.*all-reduce  1000000  blocking"):
        assert_no_blocking(found)
    with pytest.raises(AssertionError, match=r"exposed: 1\.010 ms \(predicted\), at most 0\.5"):
        assert_exposed(found, max_ms=0.5)
    for expected in ({"all-reduce": 2}, {}, {"all-reduce": 1, "all-gather": 1}):
        with pytest.raises(AssertionError, match="collectives: "):
            assert_collectives(found, expected)


def test_a_program_without_collectives_says_so() -> None:
    machine = Machine(TARGETS["h100"], Topology(1, 1), Link(1e9, 0.0), Link(1e9, 0.0))
    alone = Compiled(None, "", (Operation("k", "kernel", "", 10**6, 0, 0.0, "f32", ()),), 0, 0, ())
    with pytest.raises(AssertionError, match="the program holds no collective"):
        assert_collectives(analyze(alone, machine, 8), {"all-reduce": 1})
