"""Programs as jax 0.10 and jax 0.12 print them, cut down to what a reader must understand."""

import pytest

from trjax.xla.hlo import Shape, parse_module, parse_shapes

pytestmark = pytest.mark.fast

# jax 0.10: a plain shape on the start, replica groups as lists. jax 0.12: a tuple, the mesh by name, other spaces.
STARTS = {
    "0.10": "f32[1000]{0:S(1)} all-reduce-start(%fill), channel_id=1, replica_groups={{0,1}}, to_apply=%add",
    "0.12": "((f32[1000]{0:S(7)}), f32[1000]{0:S(7)}) all-reduce-start(%fill), channel_id=1, "
    "replica_groups=mesh['data'=2] {'data'}, to_apply=%add, output_to_operand_aliasing={{1}: (0, {})}",
}

PROGRAM = """HloModule jit_step, is_scheduled=true, input_output_alias={{ {{0}}: (0, {{}}, may-alias) }}, entry=1

%add (a.1: f32[], b.1: f32[]) -> f32[] {{
  %a.1 = f32[] parameter(0)
  %b.1 = f32[] parameter(1)
  ROOT %sum = f32[] add(%a.1, %b.1)
}}

%fused (param_0: f32[600], param_1: bf16[20,20]) -> f32[1000] {{
  %param_0 = f32[600]{{0}} parameter(0)
  %param_1 = bf16[20,20]{{1,0}} parameter(1)
  %cast = f32[20,20]{{1,0}} convert(%param_1), metadata={{op_name="jit(step)/convert (of \\"x\\")"}}
  %flat = f32[400]{{0}} bitcast(%cast)
  ROOT %joined = f32[1000]{{0}} concatenate(%param_0, %flat), dimensions={{0}}
}}

ENTRY %main.9 (p0: f32[600], p1: bf16[20,20]) -> (f32[1000], s32[]) {{
  %p0 = f32[600]{{0}} parameter(0), sharding={{replicated}}
  %p1 = bf16[20,20]{{1,0}} parameter(1)
  %one = s32[] constant(1)
  %fill = f32[1000]{{0}} fusion(%p0, /*index=1*/%p1), kind=kLoop, calls=%fused, metadata={{op_name="jit(step)/gather"}}
  %start = {start}, metadata={{op_name="jit(step)/all_reduce_deep/psum"}}, backend_config={{"is_sync":false}}
  %done = f32[1000]{{0:S(1)}} all-reduce-done(%start)
  ROOT %result = (f32[1000]{{0}}, s32[]) tuple(%done, %one)
}}
"""


@pytest.mark.parametrize("version", STARTS)
def test_reads_a_program(version: str) -> None:
    module = parse_module(PROGRAM.format(start=STARTS[version]))
    assert module.entry == "main.9"
    assert set(module.computations) == {"add", "fused", "main.9"}
    names = [instruction.name for instruction in module.computations["main.9"]]
    assert names == ["p0", "p1", "one", "fill", "start", "done", "result"]
    fill, start, done = (module.instructions[name] for name in ("fill", "start", "done"))
    assert (fill.opcode, fill.operands, fill.callees, fill.op_name) == (
        "fusion",
        ("p0", "p1"),
        ("fused",),
        "jit(step)/gather",
    )
    assert (start.opcode, start.operands, start.op_name) == (
        "all-reduce-start",
        ("fill",),
        "jit(step)/all_reduce_deep/psum",
    )
    assert start.shapes[-1].dims == (1000,)
    assert done.operands == ("start",)
    assert [inner.opcode for inner in module.reached(fill)][1:] == [
        "parameter",
        "parameter",
        "convert",
        "bitcast",
        "concatenate",
    ]
    assert module.computations["main.9"][-1].is_root


def test_shapes() -> None:
    assert parse_shapes("bf16[256,56,56,64]{3,2,1,0:T(8,128)(2,1)S(1)}") == (
        Shape("bf16", (256, 56, 56, 64), (3, 2, 1, 0)),
    )
    assert parse_shapes("(f32[64,3,3,64]{2,1,3,0}, /*index=1*/u8[0]{0}, token[])") == (
        Shape("f32", (64, 3, 3, 64), (2, 1, 3, 0)),
        Shape("u8", (0,), (0,)),
    )
    assert parse_shapes("f32[]") == (Shape("f32", (), ()),)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("pred", 1), ("u8", 1), ("bf16", 2), ("f32", 4), ("s64", 8), ("c64", 8), ("f8e4m3fn", 1), ("s4", 0.5)],
)
def test_bytes_of_each_type(dtype: str, size: float) -> None:
    assert Shape(dtype, (10,), (0,)).size_bytes == 10 * size


@pytest.mark.parametrize("text", ["", "HloModule x, entry=1\n", "HloModule x, is_scheduled=true\n"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the text of a scheduled HLO module"):
        parse_module(text)
