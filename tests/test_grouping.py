from dataclasses import replace
from itertools import combinations, pairwise

import jax
import pytest
from helpers import one_block_chain, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from trjax.cost.algorithms import Link
from trjax.cost.machines import Machine, Topology, make_machine
from trjax.cost.targets import TARGETS
from trjax.models.chain import init_chain
from trjax.step.grouping import INDIFFERENT_SECONDS, SegmentCost, choose_launches, predict_exposed, predict_segments
from trjax.step.plan import make_plan

pytestmark = pytest.mark.fast

H100 = TARGETS["h100"]
UNIT = Machine(H100, Topology(2, 1), Link(1.0, 0.0), Link(1.0, 0.0))  # two hosts: S bytes take S seconds


def groups_of(costs: list[SegmentCost], launches: tuple[str, ...]) -> list[tuple[str, int]]:
    backward = costs[::-1]
    ends = [index for index, cost in enumerate(backward, 1) if cost.name in launches or index == len(backward)]
    return [
        (backward[end - 1].name, sum(cost.gradient_bytes for cost in backward[start:end]))
        for start, end in pairwise([0, *ends])
    ]


def test_exposed_time_worked_by_hand() -> None:
    costs = [SegmentCost("stem", 1, 1), SegmentCost("body", 2, 4), SegmentCost("head", 3, 2)]
    # head done at 3, body at 5, stem at 6; all at once: from 6 to 13
    assert predict_exposed(costs, [("stem", 7)], UNIT) == pytest.approx(7, abs=1e-4)
    # head's 2 from 3 to 5, the others' 5 from 6 to 11
    assert predict_exposed(costs, [("head", 2), ("stem", 5)], UNIT) == pytest.approx(5, abs=1e-4)
    # head's 2 from 3 to 5, body's 4 from 5 to 9, where the stem waits from 6; its 1 then takes until 10
    assert predict_exposed(costs, [("head", 2), ("body", 4), ("stem", 1)], UNIT) == pytest.approx(4, abs=1e-4)
    assert choose_launches(costs, UNIT) == ("head", "body", "stem")


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20) | st.integers(10**9, 10**12)), min_size=1, max_size=7))
def test_no_other_choice_waits_less(segments: list[tuple[int, int]]) -> None:
    costs = [SegmentCost(f"s{index}", float(seconds), size) for index, (seconds, size) in enumerate(segments)]
    names = [cost.name for cost in costs]
    every = [(*chosen, "s0") for count in range(len(names)) for chosen in combinations(names[1:], count)]

    def weight(launches: tuple[str, ...]) -> float:
        return predict_exposed(costs, groups_of(costs, launches), UNIT) + INDIFFERENT_SECONDS * len(launches)

    assert weight(choose_launches(costs, UNIT)) == pytest.approx(min(map(weight, every)), rel=1e-9)


def test_a_fast_link_takes_one_group_where_nothing_is_to_hide() -> None:
    costs = [SegmentCost("a", 1.0, 10), SegmentCost("b", 1.0, 10)]
    assert choose_launches(costs, make_machine(H100, Topology(1, 1))) == ("a",)


def test_segment_costs_come_from_shapes_alone() -> None:
    chain = one_block_chain()
    config, machine = tiny_config(), make_machine(H100, Topology(1, 8))
    params, batch_stats = jax.eval_shape(lambda: init_chain(chain, jax.random.key(0), (8, 8, 3)))
    costs = predict_segments(chain, params, batch_stats, (8, 8, 3), config.global_batch, machine)
    assert [cost.name for cost in costs] == ["stem", "block", "head"]
    plan = make_plan(params, batch_stats, tuple(chain))
    gradients = sum(region.size_elements for region in plan.regions if region.kind.startswith("G_"))
    assert sum(cost.gradient_bytes for cost in costs) == 4 * gradients
    many, a100 = 10**6 * config.global_batch, replace(machine, target=TARGETS["a100"])
    larger = predict_segments(chain, params, batch_stats, (8, 8, 3), many, machine)
    slower = predict_segments(chain, params, batch_stats, (8, 8, 3), many, a100)
    assert all(more.backward_seconds > 10 * cost.backward_seconds for cost, more in zip(costs, larger, strict=True))
    assert all(less.backward_seconds > more.backward_seconds for less, more in zip(slower, larger, strict=True))
