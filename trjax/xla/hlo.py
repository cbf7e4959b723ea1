"""Scheduled HLO text, as `compiled.as_text()` prints it, turned into instructions.

Source: the text format that XLA writes, https://openxla.org/xla/operation_semantics; read from jax 0.10 to 0.12.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

_BITS = {"pred": 8, "bf16": 16, "opaque": 0}
_ARRAY = re.compile(r"([a-z]+[0-9a-z]*)\[([0-9,<=]*)\](?:\{([0-9,]*)[^}]*\})?")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_ASSIGNMENT = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPERAND = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Shape:
    """One array: its element type, its dims, and the dims from the innermost in memory to the outermost."""

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...]

    @property
    def size_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def size_bytes(self) -> int:
        """Bytes that the array takes.

        >>> Shape("bf16", (2, 3), (1, 0)).size_bytes, Shape("s32", (), ()).size_bytes
        (12, 4)
        """
        digits = re.search(r"\d+", self.dtype)
        bits = _BITS.get(self.dtype, int(digits.group()) if digits else 8)
        return math.ceil(self.size_elements * bits / 8)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: unique in the module.
        opcode: as printed, `fusion`, `all-reduce-start`, ...
        shapes: of the result; those of a tuple in order.
        operands: names of the instructions it reads.
        attributes: the rest of the line, after the operands.
        is_root: it is the result of its computation.
        argument: what stands between the parentheses: the number of a parameter, the value of a constant.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    argument: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole result."""
        return sum(shape.size_bytes for shape in self.shapes)

    @property
    def callees(self) -> tuple[str, ...]:
        """Computations that it names: a fusion's body, what a collective applies."""
        found = re.findall(r"\b(?:calls|to_apply|body|condition)=%?([\w.\-]+)", self.attributes)
        for group in re.findall(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}", self.attributes):
            found += _OPERAND.findall(group)
        return tuple(found)

    @property
    def op_name(self) -> str:
        """Where in the Python program it comes from."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def target(self) -> str:
        """What a custom call calls, `__cudnn$convForward` for instance; empty for anything else."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found.group(1) if found else ""


@dataclass(frozen=True)
class Module:
    """A compiled program: computations by name, each in the order of issue."""

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """The instructions of the entry computation by name."""
        return {instruction.name: instruction for instruction in self.computations[self.entry]}

    def reached(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields the instruction and all those of the computations that it calls."""
        yield instruction
        for callee in instruction.callees:
            for inner in self.computations.get(callee, ()):
                yield from self.reached(inner)


def _split_parentheses(text: str) -> tuple[str, str]:
    """Returns what the leading parentheses hold and what follows them; quoted text does not count."""
    depth, quoted = 0, False
    for index, character in enumerate(text):
        if character == '"' and text[index - 1] != "\\":
            quoted = not quoted
        elif not quoted and character in "()":
            depth += 1 if character == "(" else -1
            if depth == 0:
                return text[1:index], text[index + 1 :]
    raise ValueError(f"unbalanced parentheses in the program: {text[:80]}")


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Returns the arrays of a printed type, those of a tuple in order.

    >>> [shape.dims for shape in parse_shapes("(f32[2,3]{1,0}, s32[])")]
    [(2, 3), ()]
    """
    shapes = []
    for dtype, dims, order in _ARRAY.findall(text):
        sizes = tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)
        minor = tuple(int(dim) for dim in order.split(",") if dim) if order else tuple(reversed(range(len(sizes))))
        if dtype != "token":
            shapes.append(Shape(dtype, sizes, minor))
    return tuple(shapes)


def _parse_instruction(line: str) -> Instruction | None:
    match = _ASSIGNMENT.match(line)
    if match is None:
        return None
    rest = line[match.end() :]
    if rest.startswith("("):
        printed, rest = _split_parentheses(rest)
    else:
        printed, _, rest = rest.partition(" ")
    opcode, parenthesis, rest = rest.strip().partition("(")
    argument, attributes = _split_parentheses(parenthesis + rest)
    shapes, operands = parse_shapes(printed), tuple(_OPERAND.findall(argument))
    return Instruction(match.group(2), opcode, shapes, operands, attributes, bool(match.group(1)), argument)


def parse_module(text: str) -> Module:
    """Parses the text of a compiled program.

    Raises:
        ValueError: it is not the text of a scheduled HLO module.
    """
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError("not the text of a scheduled HLO module: its first line lacks is_scheduled=true")
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name = "", ""
    instructions: list[Instruction] = []
    for line in text.splitlines()[1:]:
        if header := _COMPUTATION.match(line):
            name, instructions = header.group(2), []
            entry = name if header.group(1) else entry
        elif line.startswith("}"):
            computations[name] = tuple(instructions)
        elif instruction := _parse_instruction(line):
            instructions.append(instruction)
    if entry not in computations:
        raise ValueError("not the text of a scheduled HLO module: it has no entry computation")
    return Module(computations, entry)
