"""Assertions about compiled programs, for the tests of any project: a failure shows the table of collectives.

A report comes from `trjax.audit.report.analyze`; no GPU is needed for a program that was compiled for one.
"""

from collections import Counter
from collections.abc import Mapping

from trjax.audit.report import Report
from trjax.text import format_table


def _require(holds: bool, problem: str, report: Report) -> None:
    if not holds:
        rows = [
            [row.group, row.collective, row.bytes, "blocking" if row.blocking else "async", f"{row.exposed_ms:.3f}"]
            for row in report.collectives
        ]
        table = format_table(["group", "collective", "bytes", "kind", "exposed ms"], rows)
        raise AssertionError(f"{problem}\n{table if rows else 'the program holds no collective'}")


def assert_collectives(report: Report, expected: Mapping[str, int]) -> None:
    """Asserts how many collectives of each kind a program holds, for example `{"all-reduce": 2}`, and no others."""
    found = Counter(row.collective for row in report.collectives)
    _require(found == Counter(expected), f"collectives: {dict(found)}, expected {dict(expected)}", report)


def assert_no_blocking(report: Report) -> None:
    """Asserts that kernels run between the start and the end of each collective."""
    blocking = sum(row.blocking for row in report.collectives)
    _require(not blocking, f"{blocking} of {len(report.collectives)} collectives block", report)


def assert_exposed(report: Report, max_ms: float) -> None:
    """Asserts that the kernels wait for collectives for at most `max_ms` milliseconds, as predicted for one step."""
    exposed_ms = report.summary.exposed_ms
    _require(exposed_ms <= max_ms, f"exposed: {exposed_ms:.3f} ms (predicted), at most {max_ms:g}", report)
