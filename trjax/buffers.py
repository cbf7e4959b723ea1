"""How gradients reach the buffers that are reduced, and how the reduced ones reach the parameters."""

import re
from collections import Counter
from collections.abc import Iterable

from trjax.compiled import Buffer, Compiled
from trjax.operations import Operation
from trjax.plan import Plan

STATISTICS, OTHER = "statistics", "other"
"""Groups of collectives that the plan does not name."""


def group_of(operation: Operation) -> str:
    """Returns the group that a collective reduces, by the scope that the staged backward gives it."""
    if found := re.search(r"all_reduce_(\w+)/", operation.source):
        return found.group(1)
    return STATISTICS if "norm" in operation.source.lower() else OTHER


def _moving_into(operation: Operation, by_name: dict[str, Operation], uses: Counter[str]) -> list[Operation]:
    """Returns the operations that only bring a buffer's parts together: what fills it, and the moves before that."""
    moving: list[Operation] = []
    waiting = [by_name[name] for name in operation.depends_on if name in by_name]
    fills = True
    while waiting:
        candidate = waiting.pop()
        if candidate.kind == "kernel" and (fills or candidate.moves_only) and uses[candidate.name] == 1:
            moving.append(candidate)
            waiting += [by_name[name] for name in candidate.depends_on if name in by_name]
        fills = False
    return moving


def gradient_path(operations: Iterable[Operation]) -> tuple[int, int]:
    """Returns the transposes between the gradients and the new parameters, and the bytes of superfluous moves."""
    by_name = {operation.name: operation for operation in operations}
    uses = Counter(name for operation in by_name.values() for name in operation.depends_on)
    path: dict[str, Operation] = {}
    reduced: set[str] = set()
    superfluous = 0
    for operation in by_name.values():
        if reduced & set(operation.depends_on):
            reduced.add(operation.name)
            path[operation.name] = operation
        if operation.collective and group_of(operation) != STATISTICS:
            moving = _moving_into(operation, by_name, uses)
            path |= {move.name: move for move in moving}
            superfluous += max(0, sum(move.written_bytes for move in moving) - operation.size_bytes)
            reduced.add(operation.name)
    return sum(operation.transposes for operation in path.values()), superfluous


def _place(buffers: Iterable[Buffer], operations: Iterable[Operation]) -> tuple[tuple[int, int], ...] | None:
    """Returns allocation and offset of each collective's buffer; None unless every one works in place."""
    places: dict[str, set[tuple[int, int]]] = {}
    collectives = [operation for operation in operations if operation.collective]
    for buffer in buffers:
        for operation in collectives:
            own = {operation.name, f"{operation.name}{{1}}", *operation.depends_on}
            if buffer.name in own and buffer.size_bytes == operation.size_bytes:
                places.setdefault(operation.name, set()).add((buffer.allocation, buffer.offset_bytes))
    found = [places.get(operation.name, set()) for operation in collectives]
    return tuple(place for (place,) in found) if all(len(place) == 1 for place in found) else None


def group_layout(compiled: Compiled, plan: Plan) -> tuple[bool | None, tuple[int, ...]]:
    """Returns whether the groups alone lie in one allocation, in place and as planned, and at which offsets.

    None where the compiler does not tell, or nothing is reduced.
    """
    groups = [operation for operation in compiled.operations if operation.collective]
    groups = [operation for operation in groups if group_of(operation) not in (STATISTICS, OTHER)]
    if not compiled.buffers or not groups:
        return None, ()
    places = _place(compiled.buffers, groups)
    if places is None:
        return False, ()
    offsets = tuple(offset for _, offset in places)
    allocations = {allocation for allocation, _ in places}
    others = {buffer.offset_bytes for buffer in compiled.buffers if buffer.allocation in allocations} - set(offsets)
    return len(allocations) == 1 and not others and offsets == plan.offsets_bytes, offsets
