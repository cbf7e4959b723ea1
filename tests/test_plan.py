import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trjax.config.presets import PRESETS
from trjax.cost.machines import Machine, make_machine, parse_topology
from trjax.cost.targets import TARGETS
from trjax.explain.plan import format_plan
from trjax.step.buckets import Grouping, RegionKind, at_launches, ddp_buckets, one_each, one_group, two_groups
from trjax.step.packing import pack, pack_shard, slice_regions, unpack
from trjax.step.plan import ConvOrder, Plan, PlanSpec, make_plan
from trjax.step.program import shape_run
from trjax.step.run_plan import compare_groupings
from trjax.trees import name_leaves, restore_leaves

pytestmark = pytest.mark.fast


NODE = make_machine(TARGETS["h100"], parse_topology("1x8"))
SLOW = make_machine(TARGETS["h100"], parse_topology("64x1"), link_gbytes=10)


def planned(preset: str, conv_order: ConvOrder, reducer: str = "two_group", machine: Machine = NODE) -> Plan:
    config = replace(PRESETS[preset].config, global_batch=2048)
    return compare_groupings(config, shape_run(config), machine, conv_order)[reducer][0]


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


SMALL_PARAMS = {
    "stem": {"conv": {"kernel": shape(3, 3, 1, 2)}, "norm": {"scale": shape(2), "bias": shape(2)}},
    "body": {"conv1": {"kernel": shape(1, 1, 2, 4)}, "conv2": {"kernel": shape(1, 1, 4, 4)}},
    "head": {"fc": {"kernel": shape(4, 3), "bias": shape(3)}},
}
SMALL_STATS = {"stem": {"norm": {"running_mean": shape(2), "running_var": shape(2)}}, "body": {}, "head": {}}
SEGMENTS = ("stem", "body", "head")


def layout(plan: Plan, group: int) -> list[tuple[str, str, int, int]]:
    return [(r.kind.value, r.name, r.offset_elements, r.size_elements) for r in plan.groups[group].regions]


def test_layout_worked_by_hand() -> None:
    plan = make_plan(SMALL_PARAMS, SMALL_STATS, SEGMENTS)
    deep, first = plan.groups
    assert (deep.name, deep.launch_after, deep.size_bytes) == ("deep", "body", 4 * 29)
    assert layout(plan, 0) == [
        ("G_DEEP_CONV", "body/conv2/kernel", 0, 16),
        ("G_DEEP_CONV", "body/conv1/kernel", 16, 8),
        ("R_RESULT", "results", 24, 5),
    ]
    assert (first.name, first.launch_after, first.size_bytes) == ("first", "stem", 4 * 41)
    assert layout(plan, 1) == [
        ("G_BN_BIAS", "stem/norm/bias", 0, 2),
        ("G_BN_WEIGHT", "stem/norm/scale", 2, 2),
        ("G_FC_BIAS", "head/fc/bias", 4, 3),
        ("G_FC_WEIGHT", "head/fc/kernel", 7, 12),
        ("G_FIRST_CONV", "stem/conv/kernel", 19, 18),
        ("B_NEXT_MEAN", "stem/norm/running_mean", 37, 2),
        ("B_NEXT_VAR", "stem/norm/running_var", 39, 2),
    ]


def test_launches_worked_by_hand() -> None:
    plan = make_plan(SMALL_PARAMS, SMALL_STATS, SEGMENTS, PlanSpec(partial(at_launches, (1, 2))))
    assert [(group.name, group.launch_after) for group in plan.groups] == [
        ("deep1", "head"),
        ("deep2", "body"),
        ("first", "stem"),
    ]
    assert layout(plan, 0) == [
        ("G_FC_BIAS", "head/fc/bias", 0, 3),
        ("G_FC_WEIGHT", "head/fc/kernel", 3, 12),
        ("R_RESULT", "results", 15, 5),
    ]
    assert layout(plan, 1) == [("G_DEEP_CONV", "body/conv2/kernel", 0, 16), ("G_DEEP_CONV", "body/conv1/kernel", 16, 8)]
    assert [kind for kind, *_ in layout(plan, 2)][-3:] == ["G_FIRST_CONV", "B_NEXT_MEAN", "B_NEXT_VAR"]
    # in one allocation: the largest first, each at a multiple of 256 bytes
    assert [group.size_bytes for group in plan.groups] == [80, 96, 104]
    assert plan.offsets_bytes == (512, 256, 0)


def test_resnet50_golden() -> None:
    plan = planned("imagenet-resnet50", "OHWI")
    gradients = [sum(r.size_elements for r in group.regions if r.kind.startswith("G_")) for group in plan.groups]
    assert gradients == [23_445_504, 2_111_528]
    assert sum(gradients) == 25_557_032
    # deep: + 4 results; first: + mean and variance of 26,560 channels
    assert [group.size_bytes for group in plan.groups] == [4 * (23_445_504 + 5), 4 * (2_111_528 + 2 * 26_560)]
    assert [group.launch_after for group in plan.groups] == ["stage1_block1", "stem"]
    kernel = plan.regions[1]
    assert kernel.shape == (3, 3, 512, 512)
    assert kernel.physical_order == (3, 0, 1, 2)


def test_readiness_order_counts_blocks_as_numbers() -> None:
    plan = planned("cifar10-resnet56", "HWIO")
    stage1 = [region.name.split("/")[0] for region in plan.groups[0].regions if region.name.startswith("stage1")]
    assert list(dict.fromkeys(stage1)) == [f"stage1_block{index}" for index in range(9, 0, -1)]


def test_empty_groups_vanish_and_results_move() -> None:
    no_deep = make_plan(
        {"stem": SMALL_PARAMS["stem"], "head": SMALL_PARAMS["head"]}, SMALL_STATS, ("stem", "body", "head")
    )
    assert [group.name for group in no_deep.groups] == ["first"]
    assert [region.kind for region in no_deep.regions][-3:] == [
        RegionKind.R_RESULT,
        RegionKind.B_NEXT_MEAN,
        RegionKind.B_NEXT_VAR,
    ]
    no_first = make_plan({"stem": {}, "body": SMALL_PARAMS["body"], "head": {}}, {}, SEGMENTS)
    assert [(group.name, group.launch_after) for group in no_first.groups] == [("deep", "body")]


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({"stem": {"kernel": shape(2, dtype=jnp.bfloat16)}}, {}, r"stem/kernel is bfloat16; parameters"),
        ({"other": {"kernel": shape(2)}}, {}, r"other/kernel belongs to no segment of the chain: stem, body, head"),
        ({"stem": {}}, {}, r"no parameters"),
        (SMALL_PARAMS, {"frozen": set(name_leaves(SMALL_PARAMS))}, r"no parameters to train: .* all are frozen"),
    ],
)
def test_errors(params: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(params, {}, SEGMENTS, PlanSpec(**options))


dims = st.integers(1, 5)
leaves = st.one_of(
    st.tuples(), st.tuples(dims), st.tuples(dims, dims), st.tuples(dims, dims, dims), st.tuples(dims, dims, dims, dims)
)
names = st.sampled_from(["kernel", "bias", "scale", "alpha", "w10", "w2"])
modules = st.dictionaries(
    st.sampled_from(["conv1", "conv2", "norm", "sub"]), st.dictionaries(names, leaves, min_size=1)
)
stats = st.dictionaries(st.sampled_from(["n1", "n2"]), st.fixed_dictionaries({"running_mean": leaves, "sigma": leaves}))


@st.composite
def trees(draw: st.DrawFn) -> tuple[Any, Any, tuple[str, ...]]:
    segments = tuple(f"segment{index}" for index in range(draw(st.integers(1, 12))))
    params = {segment: draw(modules) for segment in segments}
    params[draw(st.sampled_from(segments))]["always"] = {"kernel": draw(leaves)}
    batch_stats = {segment: draw(stats) for segment in segments}
    to_shapes = lambda tree: jax.tree.map(lambda s: shape(*s), tree, is_leaf=lambda x: isinstance(x, tuple))  # noqa: E731
    return to_shapes(params), to_shapes(batch_stats), segments


def splits(num_segments: int) -> st.SearchStrategy[Grouping]:
    launches = st.lists(st.integers(0, num_segments - 1)).map(lambda chosen: partial(at_launches, chosen))
    buckets = st.builds(partial, st.just(ddp_buckets), st.integers(0, 200), st.booleans())
    return st.one_of(st.sampled_from([two_groups, one_group, one_each]), launches, buckets)


@settings(max_examples=40, deadline=None)
@given(trees(), st.data())
def test_regions_tile_their_group(tree: Any, data: st.DataObject) -> None:
    params, batch_stats, segments = tree
    split = data.draw(splits(len(segments)))
    plan = make_plan(params, batch_stats, segments, PlanSpec(split))
    expected = {**name_leaves(params), **name_leaves(batch_stats), "results": shape(5)}
    assert {region.name: region.shape for region in plan.regions} == {name: s.shape for name, s in expected.items()}
    assert len(plan.regions) == len(expected)
    for group in plan.groups:
        end = 0
        for region in group.regions:
            assert region.offset_elements == end
            end = region.offset_elements + region.size_elements
        assert group.size_elements == end


@settings(max_examples=5, deadline=None)
@given(trees(), st.sampled_from(["OHWI", "HWIO"]))
def test_round_trip_is_bitwise(tree: Any, conv_order: Any) -> None:
    params, batch_stats, segments = tree
    plan = make_plan(params, batch_stats, segments, PlanSpec(conv_order=conv_order))
    random = np.random.default_rng(0)
    values = {region.name: random.normal(size=region.shape).astype(np.float32) for region in plan.regions}
    buffers = jax.jit(lambda leaves: [pack(group, leaves) for group in plan.groups])(values)
    back = jax.jit(lambda buffers: [unpack(*pair) for pair in zip(plan.groups, buffers, strict=True)])(buffers)
    for group, buffer, leaves in zip(plan.groups, buffers, back, strict=True):
        assert buffer.shape == (group.size_elements,)
        for region in group.regions:
            flat = np.asarray(buffer)[region.offset_elements :][: region.size_elements]
            np.testing.assert_array_equal(flat, values[region.name].transpose(region.physical_order).ravel())
            np.testing.assert_array_equal(leaves[region.name], values[region.name])
    restored = restore_leaves(values, params)
    np.testing.assert_equal(name_leaves(restored), {name: values[name] for name in name_leaves(params)})


@partial(jax.jit, static_argnums=(0, 1))
def _to_shards_and_back(plan: Plan, shards: int, values: dict[str, Any]) -> Any:
    """The groups' buffers, the leaves in them, and the buffers' rows after each was cut to its parts and joined."""
    buffers = [pack(group, values) for group in plan.groups]
    back = [unpack(*pair) for pair in zip(plan.groups, buffers, strict=True)]
    rows = [
        [pack_shard(group, slice_regions(group, row)) for row in buffer.reshape(shards, -1)]
        for group, buffer in zip(plan.groups, buffers, strict=True)
    ]
    return buffers, back, rows


@settings(max_examples=3, deadline=None)
@given(trees(), st.integers(2, 5))
def test_shards_hold_a_part_of_every_tensor(tree: Any, shards: int) -> None:
    params, batch_stats, segments = tree
    plan = make_plan(params, batch_stats, segments, PlanSpec(shards=shards))
    random = np.random.default_rng(0)
    values: dict[str, Any] = {
        region.name: random.normal(size=region.shape).astype(np.float32) for region in plan.regions
    }
    buffers, back, again = _to_shards_and_back(plan, shards, values)
    for group, buffer, leaves, rows_again in zip(plan.groups, map(np.asarray, buffers), back, again, strict=True):
        assert buffer.shape == (group.size_elements,)
        for name, leaf in leaves.items():
            np.testing.assert_array_equal(leaf, values[name])
        rows = buffer.reshape(shards, -1)
        for region in group.regions:
            parts = rows[:, region.offset_elements :][:, : region.shard_elements]
            flat = values[region.name].transpose(region.physical_order).ravel()
            if region.kind is RegionKind.R_RESULT:  # whole in each
                np.testing.assert_array_equal(parts, np.broadcast_to(flat, parts.shape))
            else:
                np.testing.assert_array_equal(parts.ravel()[: flat.size], flat)
                assert not parts.ravel()[flat.size :].any()
                assert parts.size - flat.size < shards
        np.testing.assert_array_equal(rows_again, rows)


def test_same_plan_in_a_fresh_process() -> None:
    code = "from test_plan import planned, SLOW; print(repr(planned('imagenet-resnet50', 'OHWI', 'auto', SLOW)))"
    here = Path(__file__).parent
    run = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == repr(planned("imagenet-resnet50", "OHWI", "auto", SLOW))


def test_table_holds_every_region_and_the_totals() -> None:
    text = format_plan(make_plan(SMALL_PARAMS, SMALL_STATS, SEGMENTS))
    assert "first  G_FIRST_CONV  stem/conv/kernel        3x3x1x2  OHWI             76     72" in text
    assert "61 parameters, 280 bytes in 2 groups" in text
