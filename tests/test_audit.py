"""The audit of steps compiled for two H100s that are not here; each planted fault turns a verdict."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import one_block_chain, tiny_config

from trjax.audit.figures import draw_timeline
from trjax.audit.report import Report
from trjax.config.run import Config
from trjax.cost.algorithms import Link
from trjax.cost.collectives import CALL_SECONDS
from trjax.cost.machines import Machine, Topology
from trjax.cost.targets import TARGETS
from trjax.mesh import AXIS, machine_of
from trjax.step import collectives, layouts
from trjax.step.compile import lower_step
from trjax.step.expected import expect
from trjax.step.plan import make_plan
from trjax.step.program import Program, make_program
from trjax.step.rules import analyze_step
from trjax.xla.compiled import Compiled, compile_lowered
from trjax.xla.operations import Operation
from trjax.xla.topology import compile_config, make_topology_mesh


def prepared(world_size: int = 2, **changes: Any) -> tuple[Config, Program, Compiled]:
    config = tiny_config(precision="bfloat16", **changes)
    mesh = make_topology_mesh(compile_config(TARGETS["h100"]), 1, world_size)
    chain = one_block_chain(collectives.sum_moments if config.bn == "sync" else None, "bfloat16")
    made = make_program(config, mesh, chain)
    return config, made, compile_lowered(lower_step(made))


def judged(config: Config, made: Program, compiled: Compiled, **options: Any) -> Report:
    machine = machine_of(made.mesh)
    return analyze_step(compiled, machine, config.global_batch, expect(config, made.plan, machine.topology), **options)


def audited(world_size: int = 2, **options: Any) -> Report:
    return judged(*prepared(world_size), **options)


def failed(found: Report) -> list[str]:
    return [verdict.name for verdict in found.verdicts if not verdict.ok]


@pytest.mark.fast
def test_two_groups_are_as_planned(tmp_path: Any) -> None:
    found = audited()
    assert failed(found) == []
    assert [(row.group, row.reduces, row.dtype, row.blocking) for row in found.collectives] == [
        ("deep", "3 gradients, results", "f32", False),
        ("first", "11 gradients, 8 statistics", "f32", False),
    ]
    summary = found.summary
    assert (summary.all_reduces, summary.blocking, summary.contiguous) == (2, 0, True)
    assert summary.offsets_bytes == (0, 3840)  # deep takes 3600 bytes, and buffers start at multiples of 256
    assert summary.step_ms == pytest.approx(summary.compute_ms + summary.exposed_ms)
    assert summary.images_per_second == pytest.approx(24e3 / summary.step_ms)
    # one CUDA graph replays the whole step
    assert (summary.graphs, summary.graph_launches, summary.launches) == (1, summary.kernels + 2, 0)
    draw_timeline(tmp_path / "timeline.png", "title", found)
    assert (tmp_path / "timeline.png").stat().st_size > 10_000


def test_statistics_take_one_all_reduce_a_normalisation_and_direction() -> None:
    of_sync = prepared(bn="sync")
    found = judged(*of_sync)
    assert failed(found) == []
    assert failed(judged(tiny_config(), *of_sync[1:])) == ["others"]  # nobody planned them
    statistics = sorted(row.bytes for row in found.collectives if row.group == "statistics")
    channels = [4, 8, 8, 8]
    assert statistics == sorted([4 * (2 * c + 1) for c in channels] + [4 * 2 * c for c in channels])


def by_hand(*, waits: bool = False, copies: bool = False) -> Report:
    """A step of one group: a gradient, its AllReduce, a kernel beside, the update; with what is to be caught."""
    leaves = {"body": {"kernel": jax.ShapeDtypeStruct((1000,), jnp.float32)}}
    plan = make_plan(leaves, {}, ("stem", "body", "head"))
    (group,) = plan.groups
    scope, size = "jit(step)/all_reduce_deep/psum", group.size_bytes
    long = 10**9  # bytes that take 0.36 ms
    gradient = Operation("gradient", "convolution", "", long, size, 0.0, "f32", ())
    copied = Operation("copied", "kernel", "", size, size, 0.0, "f32", ("gradient",), moves_only=True)
    fill = Operation("fill", "kernel", "", size, size, 0.0, "f32", ("copied" if copies else "gradient",))
    start = Operation("start", "start", scope, 0, 0, 0.0, "f32", ("fill",), collective="all-reduce", size_bytes=size)
    beside = Operation("beside", "kernel", "", long, 0, 0.0, "f32", ())
    done = Operation("done", "done", "", 0, 0, 0.0, "f32", ("start",))
    update = Operation("update", "kernel", "", size, size, 0.0, "f32", ("done",))
    between = [done, beside] if waits else [beside, done]
    operations = [gradient, *([copied] if copies else []), fill, start, *between, update]
    machine = Machine(TARGETS["h100"], Topology(2, 1), Link(1e8, 0.0), Link(1e8, 0.0))
    expected = expect(tiny_config(), plan, machine.topology)
    return analyze_step(Compiled(None, "", tuple(operations), 0, 0, ()), machine, 8, expected)


@pytest.mark.fast
def test_a_step_worked_by_hand() -> None:
    found = by_hand()
    assert failed(found) == []
    (row,) = found.collectives
    assert (row.group, row.reduces, row.bytes) == ("deep", "1 gradients, results", 4 * 1005)
    assert row.comm_ms == pytest.approx(1e3 * (CALL_SECONDS + 4020 / 1e8))
    assert row.overlapped_with == {"convolutions": 0, "kernels": 1, "ms": pytest.approx(0.36, abs=0.01)}
    assert (found.summary.exposed_ms, found.summary.gather_copy_bytes, found.summary.kernels) == (0, 0, 4)


@pytest.mark.fast
def test_a_group_that_waits_and_could_be_hidden_is_caught() -> None:
    found = by_hand(waits=True)
    assert failed(found) == ["blocking", "exposed"]
    assert found.summary.exposed_ms == found.summary.exposed_gap_ms == pytest.approx(0.05, abs=0.001)
    assert found.summary.exposed_bound_ms == 0


@pytest.mark.fast
def test_gradients_that_are_moved_twice_are_caught() -> None:
    found = by_hand(copies=True)
    assert failed(found) == ["copies"]
    assert found.summary.gather_copy_bytes == 4 * 1005


def test_one_device_reduces_nothing() -> None:
    found = audited(1)
    assert failed(found) == []
    assert (found.collectives, found.summary.contiguous) == ((), None)


def double_sum(buffer: jax.Array, after: jax.Array | None) -> jax.Array:
    return jax.lax.psum(jax.lax.pcast(jax.lax.psum(buffer, AXIS), AXIS, to="varying"), AXIS)


def in_parts(buffer: jax.Array, after: jax.Array | None) -> jax.Array:
    return jnp.concatenate([jax.lax.psum(buffer[:-1], AXIS), jax.lax.psum(buffer[-1:], AXIS)])


def in_half(buffer: jax.Array, after: jax.Array | None) -> jax.Array:
    return jax.lax.psum(buffer.astype(jnp.bfloat16), AXIS).astype(jnp.float32)


@pytest.mark.parametrize("fault", [double_sum, in_parts, in_half])
def test_other_all_reduces_than_planned_are_caught(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "all_reduce", fault)
    found = failed(audited())
    assert {"collectives", "one allocation"} <= set(found)
    assert ("blocking" in found) == (fault is double_sum)


def test_parameters_in_another_order_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = partial(layouts.state_formats, conv_order="HWIO")
    monkeypatch.setattr(layouts, "state_formats", lambda *what, conv_order: formats(*what))
    assert failed(audited(dropped=("xla_gone",))) == ["transposes", "options"]
