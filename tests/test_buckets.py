"""Splits worked by hand, and PyTorch's own."""

import math
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trjax.config.presets import preset_config
from trjax.step.buckets import (
    MIB_BYTES,
    RegionKind,
    Tensor,
    at_launches,
    ddp_buckets,
    fill_buckets,
    find_frozen,
    one_each,
    one_group,
    registration_key,
    two_groups,
)
from trjax.step.plan import list_tensors
from trjax.step.program import shape_run

pytestmark = pytest.mark.fast


@cache
def resnet50() -> list[Tensor]:
    shapes = shape_run(preset_config("imagenet-resnet50"))
    return list_tensors(shapes.params, tuple(shapes.chain))


def elements(groups: Any) -> list[int]:
    return [sum(math.prod(tensor.shape) for tensor in members) for members in groups.values()]


@pytest.mark.parametrize(
    ("rebuilt", "expected"),
    [
        (False, [3_102_696, 7_875_584, 7_417_344, 6_755_584, 405_824]),
        (True, [2_049_000, 7_875_584, 6_563_840, 6_637_568, 2_431_040]),
    ],
)
def test_buckets_of_resnet50_are_pytorchs(rebuilt: bool, expected: list[int]) -> None:
    groups = ddp_buckets(25 * MIB_BYTES, rebuilt, resnet50())
    assert list(groups) == ["bucket1", "bucket2", "bucket3", "bucket4", "bucket5"]
    assert elements(groups) == expected


def test_pytorch_says_the_same() -> None:
    """Optional, where PyTorch is installed: its own function, on the same sizes."""
    torch = pytest.importorskip("torch")
    registered = sorted(resnet50(), key=registration_key)
    for order, limits in ((registered, [MIB_BYTES, 25 * MIB_BYTES]), (registered[::-1], [MIB_BYTES, 10 * MIB_BYTES])):
        parameters = [torch.empty(tensor.shape) for tensor in order]
        buckets, _ = torch.distributed._compute_bucket_assignment_by_size(parameters, limits)
        expected = [[order[index].name for index in bucket] for bucket in buckets]
        assert [[tensor.name for tensor in bucket] for bucket in fill_buckets(order, limits)] == expected


def tensor(name: str, size: int, segment: int = 0, kind: RegionKind = RegionKind.G_DEEP_CONV) -> Tensor:
    return Tensor(name, kind, (size,), segment)


def test_a_bucket_closes_when_its_limit_is_reached() -> None:
    tensors = [tensor(name, size) for name, size in (("a", 1), ("b", 2), ("c", 3), ("d", 1), ("e", 4), ("f", 1))]
    names = lambda *limits: ["".join(t.name for t in bucket) for bucket in fill_buckets(tensors, limits)]  # noqa: E731
    assert names(8, 16) == ["ab", "cd", "e", "f"]  # 12 bytes, 16, 16, and what is left
    assert names(12, 1000) == ["ab", "cdef"]
    assert names(0) == ["a", "b", "c", "d", "e", "f"]
    assert names(10**9) == ["abcdef"]


def test_small_chain_by_hand() -> None:
    chain = [
        tensor("head/bias", 3, 2, RegionKind.G_FC_BIAS), tensor("head/kernel", 6, 2, RegionKind.G_FC_WEIGHT),
        tensor("body/kernel", 8, 1), tensor("stem/kernel", 4, 0, RegionKind.G_FIRST_CONV),
    ]  # fmt: skip
    names = lambda groups: {name: [t.name for t in members] for name, members in groups.items()}  # noqa: E731
    first = ["head/bias", "head/kernel", "stem/kernel"]
    assert names(two_groups(chain)) == {"deep": ["body/kernel"], "first": first}
    assert names(two_groups(chain[:2])) == {"first": first[:2]}
    assert names(one_group(chain)) == {"all": ["head/bias", "head/kernel", "body/kernel", "stem/kernel"]}
    assert list(names(one_each(chain)).values()) == [[t.name] for t in chain]
    assert names(at_launches([2], chain)) == {
        "deep1": ["head/bias", "head/kernel"],
        "first": ["body/kernel", "stem/kernel"],
    }
    assert names(ddp_buckets(40, True, chain)) == {
        "bucket1": ["head/bias", "head/kernel", "body/kernel"], "bucket2": ["stem/kernel"],  # 68 bytes, 16
    }  # fmt: skip
    assert names(ddp_buckets(40, False, chain)) == {
        "bucket1": ["head/kernel", "head/bias"], "bucket2": ["stem/kernel", "body/kernel"],  # 36 bytes, 48
    }  # fmt: skip


sizes = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), min_size=1, max_size=12)


@given(sizes, st.sampled_from([0, 7, 64, 10**6]), st.booleans(), st.lists(st.integers(0, 3)))
def test_every_split_places_every_gradient_once(made: Any, limit: int, rebuilt: bool, launches: list[int]) -> None:
    tensors = [tensor(f"s{segment}/w{index}", size, segment) for index, (size, segment) in enumerate(made)]
    tensors.sort(key=lambda t: -t.segment)
    splits = (two_groups, one_group, one_each, partial(ddp_buckets, limit, rebuilt), partial(at_launches, launches))
    for split in splits:
        groups = split(tensors)
        assert all(groups.values())
        assert sorted(t.name for members in groups.values() for t in members) == sorted(t.name for t in tensors)


def test_frozen_by_kind_and_by_name() -> None:
    tensors = resnet50()
    stem = {"stem/layer/conv/kernel"}
    assert find_frozen(tensors, ["G_FIRST_CONV"]) == stem
    assert len(find_frozen(tensors, ["stem/*"])) == 3
    assert find_frozen(tensors, ["*/conv/kernel", "G_FC_WEIGHT"]) == {t.name for t in tensors if len(t.shape) > 1}
    assert find_frozen(tensors, []) == frozenset()
    with pytest.raises(ValueError, match=r"freeze='layer5' names no parameter; kinds: .*G_DEEP_CONV.*names are like"):
        find_frozen(tensors, ["layer5"])
