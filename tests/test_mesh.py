import os

import jax
import pytest
from helpers import attempt
from hypothesis import given
from hypothesis import strategies as st

from trjax.mesh import make_mesh, parse_devices, split_batch, start_platform

pytestmark = pytest.mark.fast


def test_specifications() -> None:
    assert parse_devices("0,2,5") == (0, 2, 5)
    assert parse_devices(" 3 , 0-1 ") == (3, 0, 1)
    assert parse_devices("7") == (7,)
    assert parse_devices("all") == ()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", r"devices='': '' is neither an index nor a range; write all, 0-3 or 0,2,5"),
        ("0,,1", "neither an index"),
        ("3-1", r"the range 3-1 is reversed; write 1-3"),
        ("0-3,2", "device 2 is named more than once"),
        ("-1", "neither an index"),
        ("1-", "neither an index"),
        ("0-2-4", "neither an index"),
        ("two", "neither an index"),
        ("²", "neither an index"),
        ("0-99999999999", "index 99999999999 is out of range"),
        ("9" * 5000, r"devices='99.*: an index of 5000 digits is out of range"),
        ("0-4095," * 20000, "device 0 is named more than once"),
        ("٣", "neither an index"),
    ],
)
def test_bad_specifications(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_devices(spec)


@given(st.one_of(
    st.text(max_size=20),
    st.text(alphabet="0123456789,- al", max_size=8),
    st.lists(st.integers(0, 9) | st.integers(), min_size=1, max_size=4).map(lambda parts: ",".join(map(str, parts))),
    st.builds("{}-{}".format, st.integers(0, 12), st.integers(0, 12)),
))  # fmt: skip
def test_any_text_is_parsed_or_refused(spec: str) -> None:
    indices, problem = attempt(lambda: parse_devices(spec))
    if indices is None:
        assert problem.startswith(f"devices={spec!r}: ")
    else:
        assert len(set(indices)) == len(indices)
        bounds = [[int(bound) for bound in part.split("-")] for part in spec.split(",") if spec.strip() != "all"]
        assert list(indices) == [index for part in bounds for index in range(part[0], part[-1] + 1)]


def test_mesh_keeps_the_order_named() -> None:
    assert [device.id for device in make_mesh("5,0-2").devices.flat] == [5, 0, 1, 2]
    assert make_mesh("all").devices.shape == (1, 8)  # one process, one host


def test_mesh_knows_hosts() -> None:
    mesh = make_mesh("0-5", hosts=2)
    assert [[device.id for device in host] for host in mesh.devices] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="hosts=4 do not divide the 6 devices equally"):
        make_mesh("0-5", hosts=4)


def test_out_of_range_says_how_many_there_are() -> None:
    with pytest.raises(ValueError, match=r"devices='0-8': index 8 is out of range; there are 8 cpu devices, 0-7"):
        make_mesh("0-8")


def test_no_more_devices_than_the_cpu_can_simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA would abort the process in its first AllReduce."""
    monkeypatch.setattr("trjax.mesh._DRIVER_FILES", ("/no/such/file",))
    with pytest.raises(ValueError, match="devices='0-256': at most 256 simulated CPU devices"):
        start_platform("cpu", "0-256")


def test_cuda_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trjax.mesh._DRIVER_FILES", ("/no/such/file",))
    with pytest.raises(ValueError, match="no NVIDIA driver found on this machine; use --platform cpu"):
        start_platform("cuda", "all")


def test_starting_twice_keeps_the_devices() -> None:
    start_platform("cpu", "0-3")
    assert jax.device_count() == 8


@pytest.mark.parametrize(
    ("global_batch", "world_size", "message"),
    [
        (100, 8, "global_batch=100 is not divisible by world_size=8; nearest valid: 96, 104"),
        (5, 8, "nearest valid: 8$"),
    ],
)
def test_batch_not_divisible(global_batch: int, world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_batch(global_batch, world_size)


def test_nccl_variables_are_set_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    start_platform("cpu", "all", ["NCCL_ALGO=Ring", "NCCL_IB_HCA==mlx5_0:1"])
    assert os.environ["NCCL_ALGO"] == "Ring"
    assert os.environ["NCCL_IB_HCA"] == "=mlx5_0:1"
    monkeypatch.delenv("NCCL_IB_HCA")
