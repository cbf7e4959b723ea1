"""What a compiled program does, one operation after the other: bytes, FLOPs, dependencies, collectives.

Instructions that cost nothing (parameters, tuples, views) are seen through: an operation depends on operations.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from trjax.xla.hlo import Instruction, Module, Shape
from trjax.xla.replicas import ReplicaGroups, parse_groups

OperationKind = Literal["convolution", "matmul", "kernel", "start", "done", "blocking"]

_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier", "partition-id"}
_VIEWS = {"bitcast", "reshape"}
_ELEMENTWISE = {"add", "convert", "divide", "maximum", "minimum", "multiply", "negate", "subtract"}
_COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
_MOST_TRIPS = 256
_ONE_KERNEL_MARK = "__triton_collective"


@dataclass(frozen=True)
class Operation:
    """One thing that takes time, in the order of issue.

    Attributes:
        name: of its instruction.
        kind: `start` and `done` are the ends of an asynchronous collective, `blocking` is a collective that the
            kernels after it wait for.
        source: where in the Python program it comes from.
        read_bytes: read from device memory; of an operand that is only sliced, the slices.
        written_bytes: written to device memory.
        flops: of convolutions and matrix products.
        dtype: of its first operand, or of what a collective moves.
        depends_on: operations whose results it reads.
        transposes: it changes the order of dims in memory.
        moves_only: it computes nothing: a copy, a concatenation, a cut.
        collective: which collective it starts or is; empty for the others.
        size_bytes: of what each device hands in to the collective.
        groups: of devices that it joins; empty: all.
    """

    name: str
    kind: OperationKind
    source: str
    read_bytes: int
    written_bytes: int
    flops: float
    dtype: str
    depends_on: tuple[str, ...]
    transposes: bool = False
    moves_only: bool = False
    collective: str = ""
    size_bytes: int = 0
    groups: ReplicaGroups = ()


def _collective_of(module: Module, instruction: Instruction) -> tuple[str, ReplicaGroups]:
    """Returns the collective that an instruction starts or is, in whichever form it is printed, and what it joins."""
    base = instruction.opcode.removesuffix("-start")
    if base in _COLLECTIVES:
        return base, parse_groups(instruction.attributes)
    if base in ("async", "fusion", "call", "while", "conditional"):
        for inner in module.reached(instruction):
            if (opcode := inner.opcode.removesuffix("-start")) in _COLLECTIVES:
                return opcode, parse_groups(inner.attributes)
        if _ONE_KERNEL_MARK in instruction.attributes:
            return "all-reduce", ()
    return "", ()


def _window_flops(result: Shape, image: Shape, kernel: Shape, attributes: str, target: str) -> float:
    """Two for each multiplication of a convolution or of one of its two gradients."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    if labels is None:
        return 0.0
    if "BackwardFilter" in target:
        output, weights = kernel, result
    elif "BackwardInput" in target:
        output, weights = image, kernel
    else:
        output, weights = result, kernel
    features = weights.dims[labels.group(2).index("o")]
    dilated = re.search(r"lhs_dilate=([\dx]+)", attributes)  # the zeros between the rows of a strided gradient
    zeros = math.prod(map(int, dilated.group(1).split("x"))) if dilated else 1
    return 2.0 * output.size_elements * weights.size_elements / (features * zeros)


def _matmul_flops(result: Shape, left: Shape, attributes: str) -> float:
    found = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]([\d,"]*)[\]}]', attributes)
    dims = [int(dim) for dim in re.findall(r"\d+", found.group(1))] if found else []
    return 2.0 * result.size_elements * math.prod(left.dims[dim] for dim in dims)


def _flops(instruction: Instruction, defined: dict[str, Instruction]) -> tuple[OperationKind, float]:
    """Returns the kind and the FLOPs of one instruction that is not a collective."""
    shapes = [defined[name].shapes[0] for name in instruction.operands if name in defined and defined[name].shapes]
    if len(shapes) < 2 or not instruction.shapes:
        return "kernel", 0.0
    target = instruction.target
    if instruction.opcode == "convolution" or "$conv" in target:
        flops = _window_flops(instruction.shapes[0], shapes[0], shapes[1], instruction.attributes, target)
        return "convolution", flops
    if instruction.opcode == "dot" or "matmul" in target or "gemm" in target:
        return "matmul", _matmul_flops(instruction.shapes[0], shapes[0], instruction.attributes)
    return "kernel", 0.0


def _body(module: Module, instruction: Instruction) -> tuple[Instruction, ...]:
    if instruction.opcode in ("fusion", "call") and instruction.callees:
        return module.computations.get(instruction.callees[0], ())
    return ()


def _sliced_bytes(body: tuple[Instruction, ...], parameter: Instruction) -> int:
    """Returns what a fusion reads of one parameter: the slices, if it takes nothing else of it.

    A fusion computes only what it needs: of a parameter that is scaled whole and then cut, the cuts are read.
    """
    whole, total, names = parameter.size_bytes, 0.0, {parameter.name}
    elements = sum(shape.size_elements for shape in parameter.shapes)
    for inner in body:
        if not names & set(inner.operands):
            continue
        same = not inner.is_root and sum(shape.size_elements for shape in inner.shapes) == elements
        if inner.opcode in _VIEWS or (inner.opcode in _ELEMENTWISE and same):
            names.add(inner.name)
        elif inner.opcode in ("slice", "dynamic-slice", "gather"):
            total += inner.shapes[0].size_elements * whole / max(elements, 1)
        elif inner.opcode == "dynamic-update-slice" and inner.operands[0] in names:
            continue  # in place: what it overwrites is not read
        else:
            return whole
    return min(round(total), whole)


def _traffic(module: Module, instruction: Instruction, defined: dict[str, Instruction]) -> tuple[int, int]:
    """Returns the bytes read and written by a kernel."""
    body = _body(module, instruction)
    parameters = {int(inner.argument): inner for inner in body if inner.opcode == "parameter"}
    read = 0
    for index, name in enumerate(instruction.operands):
        whole = defined[name].size_bytes if name in defined else 0
        read += _sliced_bytes(body, parameters[index]) if index in parameters else whole
    local = {inner.name: inner for inner in body}
    written = 0
    for root in _results(body, local) if body else [instruction]:
        update = local.get(root.operands[1]) if root.opcode == "dynamic-update-slice" and body else None
        written += update.size_bytes if update else root.size_bytes
    return read, written


def _results(body: tuple[Instruction, ...], local: dict[str, Instruction]) -> Iterator[Instruction]:
    """Yields what a fusion writes: its root, or the parts of it."""
    for inner in body:
        if inner.is_root and inner.opcode == "tuple":
            yield from (local[name] for name in inner.operands)
        elif inner.is_root:
            yield inner


def _transposes(instruction: Instruction, body: tuple[Instruction, ...], defined: dict[str, Instruction]) -> bool:
    """Tells whether a kernel reorders dims; a transposition that moves nothing is printed as a bitcast."""
    local = {inner.name: inner for inner in body}

    def reorders(inner: Instruction, of: dict[str, Instruction]) -> bool:
        if inner.opcode == "transpose":
            return True
        source = of.get(inner.operands[0]) if inner.opcode == "copy" and inner.operands else None
        return source is not None and source.shapes[0].minor_to_major != inner.shapes[0].minor_to_major

    return any(reorders(inner, local) for inner in body) or reorders(instruction, defined)


_MOVES = _FREE | _VIEWS | {"copy", "concatenate", "slice", "dynamic-slice", "dynamic-update-slice", "transpose", "pad"}


def _moves_only(instruction: Instruction, body: tuple[Instruction, ...]) -> bool:
    return all(inner.opcode in _MOVES for inner in (body or (instruction,)))


def _make(
    module: Module, instruction: Instruction, defined: dict[str, Instruction], before: tuple[str, ...]
) -> Operation:
    name, source = instruction.name, instruction.op_name
    shapes = [defined[operand].shapes for operand in instruction.operands if operand in defined]
    first = next((shape[0].dtype for shape in shapes if shape), "")
    if instruction.opcode.endswith("-done"):
        return Operation(name, "done", source, 0, 0, 0.0, first, before)
    collective, groups = _collective_of(module, instruction)
    if collective:
        blocking = '"is_sync":true' in instruction.attributes or not instruction.opcode.endswith("-start")
        moved = sum(defined[operand].size_bytes for operand in instruction.operands if operand in defined)
        kind: OperationKind = "blocking" if blocking else "start"
        return Operation(
            name, kind, source, 0, 0, 0.0, first, before, collective=collective, size_bytes=moved, groups=groups
        )
    body = _body(module, instruction)
    local = {inner.name: inner for inner in body}
    work = [_flops(inner, local) for inner in body] or [_flops(instruction, defined)]
    read, written = _traffic(module, instruction, defined)
    kinds = [found for found, _ in work if found != "kernel"]
    kind, total = kinds[0] if kinds else "kernel", sum(flops for _, flops in work)
    transposes, moves_only = _transposes(instruction, body, defined), _moves_only(instruction, body)
    return Operation(name, kind, source, read, written, total, first, before, transposes, moves_only)


def _trips(instruction: Instruction) -> int:
    """Returns how often a loop runs, if the compiler says so and it is not too often to list; else 0."""
    found = re.search(r'known_trip_count"?:\{"n":"?(\d+)', instruction.attributes)
    trips = int(found.group(1)) if found and instruction.opcode == "while" else 0
    return trips if trips <= _MOST_TRIPS else 0


def _walk(
    module: Module, computation: str, entering: tuple[str, ...], suffix: str
) -> tuple[list[Operation], tuple[str, ...]]:
    """Returns the operations of a computation, loops written out, and those that its result comes from.

    Args:
        module: the program.
        computation: which one.
        entering: operations that its parameters come from.
        suffix: of the names of its operations, one for each time that it runs.
    """
    instructions = module.computations[computation]
    defined = {instruction.name: instruction for instruction in instructions}
    through: dict[str, tuple[str, ...]] = {}
    operations: list[Operation] = []
    for instruction in instructions:
        before = tuple(dict.fromkeys(found for name in instruction.operands for found in through.get(name, ())))
        if instruction.opcode == "parameter":
            before = entering
        if trips := _trips(instruction):
            body = re.findall(r"\bbody=%?([\w.\-]+)", instruction.attributes)[0]
            for trip in range(trips):
                inner, before = _walk(module, body, before, f"{suffix}@{trip}")
                operations += inner
        elif instruction.opcode not in _FREE:
            made = _make(module, instruction, defined, before)
            operations.append(replace(made, name=made.name + suffix))
            before = (made.name + suffix,)
        through[instruction.name] = before
    return operations, through[instructions[-1].name]


def list_operations(module: Module) -> tuple[Operation, ...]:
    """Returns the operations of a program in the order of issue; a loop's as often as they run.

    A turn of a loop waits for all of the turn before.
    """
    return tuple(_walk(module, module.entry, (), "")[0])
