import pytest

from trjax.cost.targets import CPU, TARGETS, find_target, target_of_device
from trjax.xla.topology import compile_config, make_topology_mesh

pytestmark = pytest.mark.fast


def test_h100_by_its_data_sheet() -> None:
    h100 = find_target("h100")
    assert h100.memory_bytes_per_second == 3.35e12
    assert h100.flops_per_second == {"bf16": 989e12, "f16": 989e12, "f32": 67e12}
    assert h100.nvlink_bytes_per_second == 450e9  # 900 in both directions
    lines = [line.strip() for line in compile_config(h100).splitlines()]
    for line in ("core_count: 132", "shared_memory_per_core: 233472", "shared_memory_per_block_optin: 232448"):
        assert line in lines
    assert "cuda_compute_capability { major: 9 minor: 0 }" in lines


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_can_be_compiled_for(name: str) -> None:
    target = TARGETS[name]
    mesh = make_topology_mesh(compile_config(target), hosts=2, gpus_per_host=4)
    assert mesh.size == 8
    assert [device.process_index for device in mesh.devices.flat] == [0] * 4 + [1] * 4
    device = mesh.devices.flat[0]
    assert (device.platform, target_of_device(device.device_kind)) == ("gpu", target)
    # float32 units x 2 FLOP x clock is the float32 rate
    peak = target.num_cores * target.fpus_per_core * 2 * target.clock_ghz * 1e9
    assert peak == pytest.approx(target.flops_per_second["f32"], rel=0.02)


def test_what_is_no_known_gpu_is_costed_as_a_cpu() -> None:
    assert target_of_device("cpu") is CPU
    assert target_of_device("Quadro P400") is CPU


def test_unknown_target_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"target='v100' is unknown; known: a100, h100, h200, b200"):
        find_target("v100")
