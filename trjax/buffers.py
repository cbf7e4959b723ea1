"""How gradients reach the buffers that are reduced, and how the reduced ones reach the parameters."""

import re
from collections import Counter
from collections.abc import Iterable

from trjax.compiled import Buffer, Compiled
from trjax.operations import Operation
from trjax.plan import Plan

STATISTICS, COMBINED, OTHER = "statistics", "combined", "other"
"""Groups of collectives that the plan does not name."""


def group_of(operation: Operation) -> str:
    """Returns the group that a collective reduces, by the scope that the staged backward gives it."""
    if found := re.search(r"all_reduce_(\w+)/", operation.source):
        return found.group(1)
    if not operation.source:  # the compiler has put several into one, and left out where they come from
        return COMBINED
    return STATISTICS if "norm" in operation.source.lower() else OTHER


def _moving_into(operation: Operation, by_name: dict[str, Operation], uses: Counter[str]) -> list[Operation]:
    """Returns the operations that only bring a buffer's parts together: what fills it, and the moves before that."""
    fills = {name for name in operation.depends_on if name in by_name}
    moving: list[Operation] = []
    waiting = sorted(fills)
    while waiting:
        candidate = by_name[waiting.pop()]
        only_moves = candidate.name in fills or candidate.moves_only
        if candidate.kind == "kernel" and only_moves and uses[candidate.name] == 1:
            moving.append(candidate)
            waiting += [name for name in candidate.depends_on if name in by_name]
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


def _places(buffers: Iterable[Buffer], operations: Iterable[Operation]) -> dict[str, set[tuple[int, int]]]:
    """Returns allocation and offset of what each collective reads and writes: one place if it works in place."""
    owner: dict[str, Operation] = {}
    for operation in operations:
        owner |= dict.fromkeys((operation.name, f"{operation.name}{{1}}", *operation.depends_on), operation)
    places: dict[str, set[tuple[int, int]]] = {operation.name: set() for operation in owner.values()}
    for buffer in buffers:
        used_by = owner.get(buffer.name)
        if used_by and buffer.size_bytes == used_by.size_bytes:
            places[used_by.name].add((buffer.allocation, buffer.offset_bytes))
    return places


def group_layout(compiled: Compiled, plan: Plan) -> tuple[bool | None, tuple[int, ...]]:
    """Returns whether the groups lie in one allocation, in place and as planned, and at which offsets.

    Other values may use the space while no gradient does (jax 0.12). None where the compiler does not tell, nothing
    is reduced, or by other collectives than AllReduces, which give something of another size.
    """
    collectives = [operation for operation in compiled.operations if operation.collective]
    groups = [operation for operation in collectives if group_of(operation) not in (STATISTICS, OTHER)]
    if not compiled.buffers or not groups or any(group.collective != "all-reduce" for group in groups):
        return None, ()
    places = _places(compiled.buffers, groups)
    if any(len(places[group.name]) != 1 for group in groups):
        return False, ()
    allocations, offsets = zip(*(place for group in groups for place in places[group.name]), strict=True)
    return len(set(allocations)) == 1 and offsets == plan.offsets_bytes, offsets
