"""Profiles: read in the step's own terms, and taken of the steps that were asked for."""

from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import GPU_PROFILE, one_block_chain, tiny_config
from jax.profiler import ProfileData

from trjax.run.fit import fit
from trjax.run.profile import (
    UNNAMED,
    Event,
    Profiler,
    Trace,
    divide,
    find_gaps,
    format_parts,
    length,
    merge,
    read_trace,
)


def test_spans_and_gaps() -> None:
    spans = [(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (7.0, 8.0), (5.5, 6.0), (10.0, 11.0)]
    assert merge(spans) == [(0, 3), (5, 8), (10, 11)]
    assert length(spans) == 7
    assert find_gaps(spans) == [(3, 5), (8, 10)]
    assert find_gaps([]) == []


def test_a_profile_of_a_gpu() -> None:
    trace = read_trace(ProfileData.from_text_proto(GPU_PROFILE), {"all-reduce-start.1": "deep"})
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    assert [(event.name, event.group, event.in_graph) for event in trace.events] == [
        ("fusion.1", "", False), ("loop_fusion", "", True),
        ("all-reduce-start.1", "deep", False), (nccl, UNNAMED, True),
    ]  # fmt: skip
    assert dict(trace.calls) == {"cuGraphLaunch": 2, "command_buffer::update": 1}
    assert list(trace.inputs) == [(1000, 1003)]
    parts = divide(trace, 1)
    # Microseconds from the start: computing 0 to 4 and 9 to 10, reducing 3 to 6 and 12 to 14; input 0 to 0.003.
    assert (parts.computing, parts.exposed, parts.communication) == pytest.approx((5e-3, 4e-3, 5e-3))
    assert (parts.waiting, parts.idle, parts.step) == pytest.approx((0, 5e-3, 14e-3))


def test_the_parts_of_a_step_worked_by_hand() -> None:
    events = [Event(0, 0, 4, "conv"), Event(0, 3, 7, "sum", "deep"), Event(0, 9, 10, "add"), Event(0, 20, 24, "conv")]
    events += [Event(1, 2, 4, "conv"), Event(1, 4, 24, "sum", "deep")]  # it begins late, and waits
    parts = divide(Trace(tuple(events), Counter(), ((6.0, 8.5), (15.0, 16.0))), 2)
    turns = 2 * 2 * 1e6  # devices, steps, nanoseconds of a millisecond
    assert parts.computing * turns == pytest.approx(9 + 2)
    assert parts.communication * turns == pytest.approx(4 + 20)
    assert parts.exposed * turns == pytest.approx(3 + 20)
    assert parts.waiting * turns == pytest.approx(1.5 + 1)  # of the first device's gaps, 7 to 9 and 10 to 20
    assert parts.idle * turns == pytest.approx(12 - 2.5 + 2)
    assert parts.step == pytest.approx(24 / 2 / 1e6)
    conv, add = parts.kernels
    assert (conv.name, conv.count, conv.ms * turns, add.name) == ("conv", 3 / 4, pytest.approx(10), "add")
    text = format_parts(parts, {"conv": "layer1/conv"})
    assert "layer1/conv" in text
    with pytest.raises(ValueError, match="holds no work of a device"):
        divide(Trace((), Counter(), ()), 1)


@pytest.mark.parametrize(("together", "begins"), [(1, 7), (2, 6)])
def test_a_run_takes_a_profile(
    together: int, begins: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trjax.step.program.make_chain", lambda config, spec: one_block_chain())
    # five steps an epoch, two epochs
    fit(tiny_config(workdir="run", devices="0-1", profile_steps="7:99", steps_per_dispatch=together))
    said = capsys.readouterr().out
    assert f"profile of steps {begins} to 10, in run/profile/" in said  # the end of the epoch ends it
    assert list(Path("run/profile").rglob("*.xplane.pb"))
    table = {line[:21].strip(): line[21:].split() for line in said.splitlines()}
    parts = [float(table[name][0]) for name in ("computing", "exposed communication", "waiting for input")]
    idle, step = (float(table[name][0]) for name in ("idle otherwise", "step"))
    assert min(parts[:2]) > 0
    assert parts[2] >= 0  # the host may place every batch while the devices still compute
    assert "psum" not in said  # a sum is no kernel
    assert step == pytest.approx(sum(parts) + idle, abs=0.003)
    assert "conv_general_dilated" in said
    with pytest.raises(ValueError, match="profile_steps=11:12: the run ends after step 10"):
        fit(tiny_config(workdir="other", profile_steps="11:12"))


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "profile").touch()  # a file where the folder is to be
    profiler = Profiler((1, 1), tmp_path / "profile", said.append)
    state: Any = jnp.zeros(1)
    profiler.begin(0, 1, state)
    profiler.end(1, state, jax.jit(lambda x: x).lower(state).compile())
    profiler.begin(0, 1, state)  # only once
    profiler.close()
    Profiler((5, 6), tmp_path, said.append).close()
    assert said.pop() == "warning: no profile: none of the steps 5 to 6 was done"
    assert said == [f"warning: no profile: [Errno 17] File exists: '{tmp_path / 'profile'}'"]
