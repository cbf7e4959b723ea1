from dataclasses import replace

import jax
import pytest

from trjax.config.run import Config
from trjax.cost.targets import TARGETS
from trjax.mesh import make_mesh
from trjax.step.options import nccl_settings, probe_options
from trjax.xla.options import find_known_options
from trjax.xla.topology import compile_config, make_topology_mesh

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(("name", "deterministic"), [("h100", False), ("a100", False), ("h100", True)])
def test_every_option_of_a_gpu_is_known(name: str, deterministic: bool) -> None:
    found = probe_options(make_topology_mesh(compile_config(TARGETS[name]), 1, 2), deterministic)
    assert found.dropped == ()
    assert ("xla_gpu_deterministic_ops" in found.accepted) == deterministic
    assert found.accepted["xla_gpu_enable_nccl_user_buffers"] is True
    assert "COLLECTIVES" in found.accepted["xla_gpu_enable_command_buffer"]


def test_every_option_of_the_cpu_is_known() -> None:
    found = probe_options(make_mesh("0-1"))
    assert found.dropped == ()
    assert found.accepted["xla_disable_hlo_passes"] == "cpu-all-reduce-combiner"


def test_what_is_unknown_is_dropped_by_name() -> None:
    known = ("xla_cpu_collective_call_terminate_timeout_seconds", 60)
    found = find_known_options(make_mesh("0-1"), (("xla_gone", True), known, ("xla_never_was", 1)))
    assert found.accepted == dict([known])
    assert sorted(found.dropped) == ["xla_gone", "xla_never_was"]


def test_what_the_user_tells_nccl_comes_last() -> None:
    given = Config(nccl=("NCCL_ALGO=Tree",))
    assert nccl_settings(given) == ("NCCL_ALGO=Tree",)
    *first, last = nccl_settings(replace(given, deterministic=True))
    assert ("NCCL_ALGO=Ring" in first, last) == (True, "NCCL_ALGO=Tree")


def test_any_other_failure_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: out of luck")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of luck"):
        probe_options(make_mesh("0-2"))
