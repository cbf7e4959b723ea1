"""Operations of small programs, their bytes and FLOPs worked by hand."""

from typing import Any

import pytest

from trjax.xla.hlo import parse_module
from trjax.xla.operations import Operation, list_operations

pytestmark = pytest.mark.fast


def read(entry: str, computations: str = "") -> dict[str, Operation]:
    text = f"HloModule test, is_scheduled=true\n\n{computations}\nENTRY %main () -> f32[] {{\n{entry}\n}}\n"
    return {operation.name: operation for operation in list_operations(parse_module(text))}


IMAGE, KERNEL, OUTPUT = "bf16[8,16,16,32]{3,2,1,0}", "bf16[64,3,3,32]{3,2,1,0}", "bf16[8,8,8,64]{3,2,1,0}"
IMAGE_BYTES, KERNEL_BYTES, OUTPUT_BYTES = 2 * 8 * 16 * 16 * 32, 2 * 64 * 9 * 32, 2 * 8 * 8 * 8 * 64
FLOPS = 2 * (8 * 8 * 8 * 64) * (9 * 32)  # two for each output, tap and input channel


@pytest.mark.parametrize(
    ("target", "first", "second", "result"),
    [
        ("Forward", IMAGE, KERNEL, OUTPUT),
        ("BackwardInput", OUTPUT, KERNEL, IMAGE),
        ("BackwardFilter", IMAGE, OUTPUT, KERNEL),
    ],
)
def test_convolution_and_its_two_gradients(target: str, first: str, second: str, result: str) -> None:
    found = read(
        f"  %x = {first} parameter(0)\n  %y = {second} parameter(1)\n"
        f"  %conv = ({result}, u8[0]{{0}}) custom-call(%x, %y), window={{size=3x3 stride=2x2 pad=1_1x1_1}}, "
        f'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{target}"'
    )
    conv = found["conv"]
    assert (conv.kind, conv.flops, conv.dtype) == ("convolution", FLOPS, "bf16")
    assert conv.read_bytes + conv.written_bytes == IMAGE_BYTES + KERNEL_BYTES + OUTPUT_BYTES


def test_convolution_of_the_cpu() -> None:
    (conv,) = read(
        "  %x = f32[8,16,16,32]{3,2,1,0} parameter(0)\n  %y = f32[3,3,32,64]{3,2,1,0} parameter(1)\n"
        "  %conv = f32[8,8,8,64]{3,2,1,0} convolution(%x, %y), window={size=3x3 stride=2x2}, dim_labels=b01f_01io->b01f"
    ).values()
    assert (conv.kind, conv.flops) == ("convolution", FLOPS)


@pytest.mark.parametrize(
    "call",
    [
        "dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        'custom-call(%x, %y), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}',
    ],
)
def test_matrix_product(call: str) -> None:
    (found,) = read(
        f"  %x = f32[5,7]{{1,0}} parameter(0)\n  %y = f32[7,11]{{1,0}} parameter(1)\n  %m = f32[5,11]{{1,0}} {call}"
    ).values()
    assert (found.kind, found.flops) == ("matmul", 2 * 5 * 7 * 11)
    assert (found.read_bytes, found.written_bytes) == (4 * (35 + 77), 4 * 55)


FUSED = """
%cuts (a: f32[100], b: f32[50]) -> (f32[10], f32[50]) {
  %a = f32[100]{0} parameter(0)
  %double = f32[100]{0} multiply(%a, %a)
  %view = f32[10,10]{1,0} bitcast(%double)
  %cut = f32[1,10]{1,0} slice(%view), slice={[0:1], [0:10]}
  %row = f32[10]{0} bitcast(%cut)
  %b = f32[50]{0} parameter(1)
  %twice = f32[50]{0} add(%b, %b)
  ROOT %both = (f32[10]{0}, f32[50]{0}) tuple(%row, %twice)
}

%writes (a: f32[100], b: f32[10]) -> f32[100] {
  %a.1 = f32[100]{0} parameter(0)
  %b.1 = f32[10]{0} parameter(1)
  %zero = s32[] constant(0)
  ROOT %new = f32[100]{0} dynamic-update-slice(%a.1, %b.1, %zero)
}

%turns (a: f32[10,10]) -> f32[10,10] {
  %a.2 = f32[10,10]{1,0} parameter(0)
  ROOT %turned = f32[10,10]{1,0} transpose(%a.2), dimensions={1,0}
}
"""


def test_traffic_is_what_a_kernel_takes() -> None:
    found = read(
        "  %x = f32[100]{0} parameter(0)\n  %y = f32[50]{0} parameter(1)\n"
        "  %cut = (f32[10]{0}, f32[50]{0}) fusion(%x, %y), kind=kLoop, calls=%cuts\n"
        "  %part = f32[10]{0} get-tuple-element(%cut), index=0\n"
        "  %put = f32[100]{0} fusion(%x, %part), kind=kLoop, calls=%writes\n"
        "  %square = f32[10,10]{1,0} bitcast(%put)\n"
        "  %turn = f32[10,10]{1,0} fusion(%square), kind=kInput, calls=%turns\n"
        "  %relaid = f32[10,10]{0,1} copy(%square)",
        FUSED,
    )
    assert (found["cut"].read_bytes, found["cut"].written_bytes) == (4 * (10 + 50), 4 * (10 + 50))
    assert (found["put"].read_bytes, found["put"].written_bytes) == (4 * 10, 4 * 10)  # the rest stays where it is
    assert found["put"].depends_on == ("cut",)  # through the tuple
    assert found["turn"].depends_on == ("put",)  # through the view
    assert [name for name, operation in found.items() if operation.transposes] == ["turn", "relaid"]
    assert [name for name, operation in found.items() if operation.moves_only] == ["put", "turn", "relaid"]


COLLECTIVES = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%wrapped (p: f32[100]) -> f32[100] {
  %p = f32[100]{0} parameter(0)
  ROOT %inner = f32[100]{0} all-reduce(%p), to_apply=%sum
}

%fused_psum (q: f32[100]) -> f32[100] {
  %q = f32[100]{0} parameter(0)
  ROOT %reduced = f32[100]{0} all-reduce-start(%q), to_apply=%sum
}
"""


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        ("f32[100]{0} all-reduce-start(%x), to_apply=%sum", "start"),
        ('f32[100]{0} all-reduce-start(%x), to_apply=%sum, backend_config={"is_sync":true}', "blocking"),
        ("((f32[100]{0}), f32[100]{0}) all-reduce-start(%x), to_apply=%sum", "start"),
        ("f32[100]{0} all-reduce(%x), to_apply=%sum", "blocking"),
        ("((f32[100]{0}), f32[100]{0}) async-start(%x), calls=%wrapped", "start"),
        ("((f32[100]{0}), f32[100]{0}) fusion-start(%x), kind=kCustom, calls=%fused_psum", "start"),
        ('f32[100]{0} fusion(%x), kind=kCustom, calls=%cuts, backend_config="__triton_collective"', "blocking"),
    ],
)
def test_every_printed_form_of_an_all_reduce_is_found(start: str, kind: str) -> None:
    found = read(
        f"  %x = f32[100]{{0}} parameter(0)\n  %copy = f32[100]{{0}} copy(%x)\n"
        f"  %start = {start.replace('%x', '%copy')}\n  %done = f32[100]{{0}} all-reduce-done(%start)",
        COLLECTIVES + FUSED,
    )
    assert (found["start"].kind, found["start"].collective) == (kind, "all-reduce")
    assert (found["start"].size_bytes, found["start"].dtype) == (400, "f32")
    assert found["start"].depends_on == ("copy",)
    assert (found["done"].kind, found["done"].depends_on) == ("done", ("start",))


def test_an_all_reduce_of_many_arrays_counts_them_all() -> None:
    found: Any = read(
        "  %x = f32[100]{0} parameter(0)\n  %y = f32[20]{0} parameter(1)\n"
        "  %all = (f32[100]{0}, f32[20]{0}) all-reduce(%x, %y), to_apply=%sum",
        COLLECTIVES,
    )
    assert found["all"].size_bytes == 480


LOOP = """HloModule m, is_scheduled=true

%body (p: (f32[100])) -> (f32[100]) {
  %p = (f32[100]{0}) parameter(0)
  %x = f32[100]{0} get-tuple-element(%p), index=0
  %twice = f32[100]{0} add(%x, %x)
  %sum = f32[100]{0} all-reduce(%twice), replica_groups={{0,1}}, to_apply=%add
  ROOT %t = (f32[100]{0}) tuple(%sum)
}

ENTRY %main (a: f32[100]) -> f32[100] {
  %a = f32[100]{0} parameter(0)
  %first = f32[100]{0} negate(%a)
  %in = (f32[100]{0}) tuple(%first)
  %loop = (f32[100]{0}) while(%in), condition=%more, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %out = f32[100]{0} get-tuple-element(%loop), index=0
  ROOT %last = f32[100]{0} negate(%out)
}
"""


def test_a_loop_is_listed_as_often_as_it_runs() -> None:
    operations = list_operations(parse_module(LOOP))
    assert [(op.name, op.depends_on, op.collective) for op in operations] == [
        ("first", (), ""),
        ("twice@0", ("first",), ""),
        ("sum@0", ("twice@0",), "all-reduce"),
        ("twice@1", ("sum@0",), ""),
        ("sum@1", ("twice@1",), "all-reduce"),
        ("twice@2", ("sum@1",), ""),
        ("sum@2", ("twice@2",), "all-reduce"),
        ("last", ("sum@2",), ""),
    ]
    assert sum(op.written_bytes for op in operations if not op.collective) == 5 * 400
    (unknown,) = [op for op in list_operations(parse_module(LOOP.replace("known", "other"))) if op.name == "loop"]
    assert unknown.collective == "all-reduce"  # of a loop of unknown length, only that it communicates
