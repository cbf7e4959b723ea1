"""Rules about collectives that hold for any program: each gives a verdict."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

TOLERANCE_MS = 0.03
"""Exposed time above what the dependencies force that still counts as hidden: a few kernels."""
MOST_LISTED = 8
"""Names or calls that a verdict lists; of more it gives the number."""


@dataclass(frozen=True)
class Verdict:
    """What one rule found.

    Attributes:
        name: of the rule, the same in every version.
        ok: the rule holds.
        text: what was found.
    """

    name: str
    ok: bool
    text: str


def judge_blocking(blocking: Iterable[str]) -> Verdict:
    """No group blocks: kernels run between the start and the end of each of its collectives.

    Args:
        blocking: the group of each collective that blocks.
    """
    groups = Counter(blocking)
    names = list(groups) if len(groups) <= MOST_LISTED else [f"{len(groups)} of them"]
    return Verdict("blocking", not groups, f"blocking groups: {', '.join(names) or 'none'}")


def judge_exposed(exposed_ms: float, forced_ms: float) -> Verdict:
    """The schedule exposes no more communication than the dependencies force.

    Args:
        exposed_ms: time in which the kernels wait for the groups.
        forced_ms: the part of it that no other schedule avoids.
    """
    allowed_ms = max(0.0, forced_ms) + TOLERANCE_MS
    text = f"groups exposed: {exposed_ms:.3f} ms, at most {allowed_ms:.3f}"
    return Verdict("exposed", exposed_ms <= allowed_ms, text)


def judge_transposes(transposes: int) -> Verdict:
    """No array is transposed on its way into a collective's buffer or out of it."""
    return Verdict("transposes", transposes == 0, f"transposes of gradients: {transposes}")


def judge_copies(copied_bytes: int, allowed_bytes: int) -> Verdict:
    """Arrays are gathered into the buffers in one pass; `allowed_bytes` may be moved once more."""
    text = f"copies to gather gradients: {copied_bytes:,} bytes, at most {allowed_bytes:,}"
    return Verdict("copies", copied_bytes <= allowed_bytes, text)
