"""Layouts and paths of gradients worked by hand."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from trjax.audit.gradients import find_copies, find_offsets
from trjax.step.plan import make_plan
from trjax.step.rules import group_of
from trjax.xla.dumps import Buffer
from trjax.xla.operations import Operation

pytestmark = pytest.mark.fast

SHAPES = {name: {"kernel": jax.ShapeDtypeStruct((100,), jnp.float32)} for name in ("stem", "body", "head")}
PLAN = make_plan(SHAPES, {}, ("stem", "body", "head"))  # deep: 420 bytes at 512; first: 800 bytes at 0


def reduce(name: str, group: str, size_bytes: int, fill: str) -> Operation:
    source = f"jit(step)/all_reduce_{group}/psum"
    return Operation(name, "start", source, 0, 0, 0.0, "f32", (fill,), collective="all-reduce", size_bytes=size_bytes)


DEEP, FIRST = reduce("s1", "deep", 420, "fill1"), reduce("s2", "first", 800, "fill2")
IN_PLACE = (
    Buffer("fill1", 5, 1024, 420),
    Buffer("s1", 5, 1024, 420),
    Buffer("fill2", 5, 0, 800),
    Buffer("s2{1}", 5, 0, 800),
    Buffer("s2{}", 6, 0, 16),  # the tuple of pointers that jax 0.12 keeps
)


def offsets(*buffers: Buffer) -> tuple[int, ...] | None:
    return find_offsets(buffers, (DEEP, FIRST))


copies = partial(find_copies, gathers=lambda _: True)


def test_groups_in_place_in_one_allocation() -> None:
    assert [group.size_bytes for group in PLAN.groups] == [420, 800]
    assert PLAN.offsets_bytes == (1024, 0)
    assert offsets(*IN_PLACE) == PLAN.offsets_bytes


def test_other_layouts_are_told() -> None:
    assert offsets() is None
    elsewhere = [replace(buffer, allocation=9) if buffer.name in ("fill1", "s1") else buffer for buffer in IN_PLACE]
    assert offsets(*elsewhere) == ()
    shifted = [replace(buffer, offset_bytes=2048) if buffer.name in ("fill1", "s1") else buffer for buffer in IN_PLACE]
    assert offsets(*shifted) == (2048, 0)
    copied = [replace(buffer, offset_bytes=4096) if buffer.name == "s1" else buffer for buffer in IN_PLACE]
    assert offsets(*copied) == ()  # not in place


def test_groups_by_scope() -> None:
    assert group_of(DEEP) == "deep"
    assert group_of(replace(DEEP, source="jit(step)/layer1/norm/psum")) == "statistics"
    assert group_of(replace(DEEP, source="jit(step)/psum")) == "other"


def test_transposes_and_copies_on_the_way_of_a_gradient() -> None:
    def kernel(name: str, *depends_on: str, transposes: bool = False, moves_only: bool = False) -> Operation:
        return Operation(name, "kernel", "", 0, 420, 0.0, "f32", depends_on, transposes, moves_only)

    done = Operation("d1", "done", "", 0, 0, 0.0, "f32", ("s1",))
    clean = [kernel("g"), kernel("fill1", "g"), DEEP, done, kernel("update", "d1")]
    assert copies(clean) == (0, 0)
    elsewhere = [kernel("forward", transposes=True), *clean]
    assert copies(elsewhere) == (0, 0)
    turned = [*clean[:-1], kernel("update", "d1", transposes=True)]
    assert copies(turned) == (1, 0)
    moved = [kernel("g"), kernel("turn", "g", transposes=True, moves_only=True), kernel("fill1", "turn"), *clean[2:]]
    assert copies(moved) == (1, 420)
