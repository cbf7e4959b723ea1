"""How arrays reach the buffers of collectives: copies and transposes on the way, and where the buffers lie."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from trjax.xla.dumps import Buffer
from trjax.xla.operations import Operation


def _moves_into(operation: Operation, by_name: dict[str, Operation], uses: Counter[str]) -> list[Operation]:
    """Returns the operations that only bring a buffer's parts together: the one that fills it, and moves before it."""
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


def find_copies(operations: Iterable[Operation], gathers: Callable[[Operation], bool]) -> tuple[int, int]:
    """Counts transposes and copies that a program makes only for its collectives.

    Args:
        operations: of the program, in the order of issue.
        gathers: tells whether the arrays of a collective are gathered into a buffer for it, as gradients are.

    Returns:
        The number of transposes between the operands and the uses of these collectives, and the bytes that are
        written to gather the operands beyond one pass that fills each buffer.
    """
    by_name = {operation.name: operation for operation in operations}
    uses = Counter(name for operation in by_name.values() for name in operation.depends_on)
    path: dict[str, Operation] = {}
    reduced: set[str] = set()
    superfluous = 0
    for operation in by_name.values():
        if reduced & set(operation.depends_on):
            reduced.add(operation.name)
            path[operation.name] = operation
        if operation.collective and gathers(operation):
            moving = _moves_into(operation, by_name, uses)
            path |= {move.name: move for move in moving}
            superfluous += max(0, sum(move.written_bytes for move in moving) - operation.size_bytes)
            reduced.add(operation.name)
    return sum(operation.transposes for operation in path.values()), superfluous


def _places(buffers: Iterable[Buffer], operations: Iterable[Operation]) -> dict[str, set[tuple[int, int]]]:
    """Returns allocation and offset of each collective's operand and result: a single place if it works in place."""
    owner: dict[str, Operation] = {}
    for operation in operations:
        owner |= dict.fromkeys((operation.name, f"{operation.name}{{1}}", *operation.depends_on), operation)
    places: dict[str, set[tuple[int, int]]] = {operation.name: set() for operation in owner.values()}
    for buffer in buffers:
        used_by = owner.get(buffer.name)
        if used_by and buffer.size_bytes == used_by.size_bytes:
            places[used_by.name].add((buffer.allocation, buffer.offset_bytes))
    return places


def find_offsets(buffers: Sequence[Buffer], collectives: Sequence[Operation]) -> tuple[int, ...] | None:
    """Returns the offset of each AllReduce's buffer in the one allocation that holds them all, in order.

    Other values may use the space when no gradient does (jax 0.12).

    Returns:
        Offsets in bytes; empty if an AllReduce is not in place or the buffers lie in several allocations. None if
        the compiler does not say, there is no collective, or one is not an AllReduce, whose result has another size.
    """
    if not buffers or not collectives or any(operation.collective != "all-reduce" for operation in collectives):
        return None
    places = _places(buffers, collectives)
    if any(len(places[operation.name]) != 1 for operation in collectives):
        return ()
    allocations, offsets = zip(*(place for found in collectives for place in places[found.name]), strict=True)
    return offsets if len(set(allocations)) == 1 else ()
