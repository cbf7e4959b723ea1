import jax
import pytest

from trjax.mesh import make_mesh, make_topology_mesh
from trjax.options import probe_options
from trjax.targets import TARGETS, compile_config

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("name", ["h100", "a100"])
def test_every_option_of_a_gpu_is_known(name: str) -> None:
    found = probe_options(make_topology_mesh(compile_config(TARGETS[name]), 1, 2))
    assert found.dropped == ()
    assert found.accepted["xla_gpu_enable_nccl_user_buffers"] is True
    assert "COLLECTIVES" in found.accepted["xla_gpu_enable_command_buffer"]


def test_every_option_of_the_cpu_is_known() -> None:
    found = probe_options(make_mesh("0-1"))
    assert found.dropped == ()
    assert found.accepted["xla_disable_hlo_passes"] == "cpu-all-reduce-combiner"


def test_what_is_unknown_is_dropped_by_name() -> None:
    known = ("xla_cpu_collective_call_terminate_timeout_seconds", 60)
    found = probe_options(make_mesh("0-1"), (("xla_gone", True), known, ("xla_never_was", 1)))
    assert found.accepted == dict([known])
    assert sorted(found.dropped) == ["xla_gone", "xla_never_was"]


def test_any_other_failure_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: out of luck")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of luck"):
        probe_options(make_mesh("0-2"))
