"""Every way of summing gives the same gradients, whatever the number of devices; the program shows how."""

import re
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    Dense,
    dense_chain,
    noise_block,
    plain_gradients,
    reduced_on,
    tiny_config,
    tiny_program,
    worst_kind_error,
)  # fmt: skip

from trjax.config.run import Config, OptimConfig, Reducing
from trjax.cost.machines import Topology
from trjax.cost.targets import TARGETS
from trjax.mesh import machine_of
from trjax.models.chain import init_chain
from trjax.step.buckets import at_launches
from trjax.step.compile import lower_step
from trjax.step.expected import expect
from trjax.step.options import DETERMINISTIC, train_step_options
from trjax.step.program import make_program
from trjax.step.reducers import make_reducer
from trjax.step.rules import analyze_step
from trjax.xla.compiled import compile_lowered
from trjax.xla.topology import compile_config, make_topology_mesh

EXACT = 2e-6
"""Relative error that float32 sums in another order may leave, by kind of leaf."""
REDUCERS = list(get_args(Reducing))
GLOBAL_BATCH = 24


@cache
def start() -> Any:
    """A chain of odd sizes with a BatchNorm, and a global batch."""
    params, batch_stats = init_chain(dense_chain("local"), jax.random.key(2), (3, 3, 1))
    return params, batch_stats, noise_block(5, GLOBAL_BATCH, (3, 3, 1))


@cache
def whole_batch() -> dict[str, Any]:
    gradients, stats = plain_gradients(dense_chain("local"), *start())
    return gradients | stats


def reduced_by(name: Any, num_devices: int, how: Any = MappingProxyType({}), **changes: Any) -> dict[str, np.ndarray]:
    config = Config(reducer=name, bucket_mb=200 / 2**20, **changes)
    reducer, chain = make_reducer(config), dense_chain("sync")
    if name == "auto":  # groups that it might choose
        reducer = replace(reducer, split=partial(at_launches, [3, 2]))
    planned: dict[str, Any] = {
        "shards": num_devices if reducer.sharded else 1, "bundled": not reducer.ordinary,
        "comm_dtype": config.comm_dtype,
    }  # fmt: skip
    hosts = 2 if name == "hierarchical" and num_devices % 2 == 0 else 1
    recipe: dict[str, Any] = {"launch": reducer.launch, "sharded": reducer.sharded, **how}
    recipe |= {"hosts": hosts, "planned": planned}
    params, batch_stats, block = start()
    return reduced_on(num_devices, chain, params, batch_stats, block, reducer.split, **recipe)


@cache
def two_groups_on_four() -> dict[str, np.ndarray]:
    return reduced_by("two_group", 4)


@pytest.mark.parametrize("num_devices", [1, 2, pytest.param(3, marks=pytest.mark.fast), 4, 8])
@pytest.mark.parametrize("name", REDUCERS)
def test_every_reducer_gives_the_gradients_of_one_device(name: str, num_devices: int) -> None:
    reduced = reduced_by(name, num_devices)
    assert reduced.keys() == {*whole_batch(), "results"}
    assert worst_kind_error(reduced, whole_batch()) < EXACT
    assert reduced["results"][3] == GLOBAL_BATCH


@pytest.mark.parametrize("name", ["ring", "zero1"])
def test_the_same_bits_every_time(name: str) -> None:
    one, other = reduced_by(name, 4), reduced_by(name, 4)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("zero1", {"micro_batches": 3}), ("ring", {"micro_batches": 2}), ("zero1", {"statistics": "first"})],
)
def test_combinations_give_what_two_groups_give(name: str, recipe: Any) -> None:
    found, expected = reduced_by(name, 4, recipe), reduced_by("two_group", 4, recipe)
    assert worst_kind_error(found, {key: expected[key] for key in whole_batch()}) < EXACT
    np.testing.assert_allclose(found["results"], expected["results"], rtol=EXACT)


@pytest.mark.parametrize("name", ["zero1", "hierarchical", "ring"])
def test_narrow_sums_of_other_reducers(name: str) -> None:
    exact, narrow = two_groups_on_four(), reduced_by(name, 4, comm_dtype="bfloat16")
    gradients = {key: exact[key] for key in whole_batch() if "running" not in key}
    assert 0 < worst_kind_error(narrow, gradients) < 2 * 2**-8
    assert worst_kind_error(narrow, {key: exact[key] for key in whole_batch() if "running" in key}) < EXACT


def test_one_ring_message_too_few_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    shifts = iter(range(10**6))
    permute = jax.lax.ppermute

    def drop(x: jax.Array, axis: Any, perm: Any) -> jax.Array:
        return 0 * x if next(shifts) == 4 else permute(x, axis, perm)

    monkeypatch.setattr(jax.lax, "ppermute", drop)
    with pytest.raises(AssertionError):
        test_every_reducer_gives_the_gradients_of_one_device("ring", 3)


@pytest.mark.parametrize(("dtype", "rounding"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_narrow_sums_round_gradients_alone(dtype: Any, rounding: float) -> None:
    exact = two_groups_on_four()
    narrow = reduced_by("two_group", 4, comm_dtype=dtype)
    gradients = [name for name in exact if name in whole_batch() and "running" not in name]
    assert 0 < worst_kind_error(narrow, {name: exact[name] for name in gradients}) < rounding
    for name in exact.keys() - set(gradients):  # results and statistics travel in float32
        np.testing.assert_array_equal(narrow[name], exact[name])


def test_half_precision_sums_do_not_overflow() -> None:
    """Gradients of 3e4 on each of eight devices: their sum would not fit, their mean does."""
    chain, (_, labels, mask) = {"only": Dense(10, relu=False)}, start()[2]
    images = np.full((GLOBAL_BATCH, 3), 3.3e4, np.float32)
    params = {"only": {"Dense_0": {"kernel": jnp.zeros((3, 10)), "bias": jnp.zeros(10)}}}
    batch_stats: Any = {"only": {}}
    block = images, np.zeros_like(labels), mask
    exact = reduced_on(8, chain, params, batch_stats, block)["only/Dense_0/kernel"]
    half = reduced_on(8, chain, params, batch_stats, block, planned={"comm_dtype": "float16"})["only/Dense_0/kernel"]
    assert np.abs(exact).max() * 8 > np.finfo(np.float16).max > np.abs(exact).max() > 2.5e4
    np.testing.assert_allclose(half, exact, rtol=8 * 2**-11)  # eight roundings


def test_narrow_groups_are_reduced_in_their_type() -> None:
    """In the lowered program: XLA's CPU backend sums bfloat16 in float32."""
    text = lower_step(tiny_program(2, comm_dtype="bfloat16")).as_text()
    sums = re.findall(r'"stablehlo\.all_reduce".*?\}\) : \(tensor<(\w+)>\)', text, re.DOTALL)
    deep, first, rest = tiny_program(2, comm_dtype="bfloat16").plan.groups
    assert sums == [f"{deep.size_elements}xbf16", f"{first.size_elements}xbf16", f"{rest.size_elements}xf32"]
    assert {region.kind.value[0] for region in rest.regions} == {"R", "B"}


CASES: list[tuple[Any, tuple[int, int], dict[str, Any]]] = [
    ("single", (1, 2), {}),
    ("ddp", (1, 2), {"freeze": ("first/*",)}),
    ("ring", (1, 4), {}),
    ("ring", (1, 3), {"comm_dtype": "bfloat16"}),
    ("hierarchical", (2, 2), {}),
    ("hierarchical", (1, 4), {}),
    ("hierarchical", (4, 1), {}),
    ("zero1", (2, 2), {"bn": "sync", "freeze": ("first/*", "middle/Dense_0/*")}),
    ("zero1", (1, 4), {"comm_dtype": "bfloat16", "optim": OptimConfig(kind="lars", clip_norm=1.0)}),
    ("zero1", (1, 2), {"optim": OptimConfig(kind="lamb")}),
    ("per_leaf", (1, 2), {}),
]


@pytest.mark.parametrize(("name", "topology", "changes"), CASES)
def test_programs_hold_what_the_reducer_says(name: Any, topology: tuple[int, int], changes: Any) -> None:
    config = tiny_config(reducer=name, bucket_mb=0.003, **changes)
    mesh = make_topology_mesh(compile_config(TARGETS["h100"]), *topology)
    program = make_program(config, mesh, dense_chain("sync" if config.bn == "sync" else "local"))
    expected = expect(config, program.plan, Topology(*topology))
    compiled = compile_lowered(lower_step(program))
    found = analyze_step(compiled, machine_of(mesh), config.global_batch, expected)
    calls = [(row.group, row.collective, row.bytes) for row in found.collectives]
    if name == "per_leaf":  # the compiler puts these together
        assert sum(row.bytes for row in found.collectives) == sum(group.size_bytes for group in program.plan.groups)
        assert len(calls) < len(program.plan.groups) == 8 + 2 + 1 + 2
        return
    assert [verdict.text for verdict in found.verdicts[:2] if not verdict.ok] == []
    assert Counter(call for call in calls if call[0] not in ("other", "statistics")) == expected.groups
    if name == "ring":
        messages = [count for (group, *_), count in expected.groups.items() if group == "deep"]
        assert messages == [2 * (topology[1] - 1)]
    if (name, topology) == ("hierarchical", (2, 2)):
        joined = Counter(operation.groups for operation in compiled.operations if operation.collective)
        assert joined == {((0, 1), (2, 3)): 4, ((0, 2), (1, 3)): 2}  # in each host, and across


def test_determinism_reaches_the_ordinary_step_too() -> None:
    """It is compiled with the compiler's own options, and with these."""
    mesh = make_topology_mesh(compile_config(TARGETS["h100"]), 1, 2)
    config = tiny_config(reducer="per_leaf", deterministic=True)
    plan = make_program(config, mesh, dense_chain()).plan
    assert train_step_options(config, make_reducer(config), plan, mesh) == DETERMINISTIC[mesh.devices.flat[0].platform]
    assert train_step_options(replace(config, deterministic=False), make_reducer(config), plan, mesh) is None
