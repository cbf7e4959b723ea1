import pytest

from trjax.cost import (
    CALL_SECONDS,
    LAUNCH_SECONDS,
    Link,
    Machine,
    Topology,
    make_machine,
    parse_topology,
    predict_all_reduce,
    predict_kernel,
    predict_ring,
    predict_tree,
)
from trjax.targets import TARGETS

pytestmark = pytest.mark.fast

GIB = 2**30
H100 = TARGETS["h100"]


def machine(hosts: int, gpus: int, nvlink: Link, network: Link) -> Machine:
    return Machine(H100, Topology(hosts, gpus), nvlink, network)


def test_ring_worked_by_hand() -> None:
    # 8 ranks, 1 GiB, 25 GiB/s: 1.75 GiB leave every rank in 14 messages
    assert predict_ring(GIB, 8, Link(25 * GIB, 0.0)) == pytest.approx(1.75 / 25)
    assert predict_ring(0, 8, Link(1.0, 1.0)) == 14


def test_ring_from_8_to_64_ranks() -> None:
    fast, slow = Link(1e9, 0.0), Link(1e30, 1.0)
    assert predict_ring(1e9, 64, fast) / predict_ring(1e9, 8, fast) == pytest.approx(1.125)
    assert predict_ring(1e9, 64, slow) / predict_ring(1e9, 8, slow) == pytest.approx(9)


def test_tree_worked_by_hand() -> None:
    assert predict_tree(1.2e9, 1024, Link(6e9, 0.0)) == pytest.approx(0.4)  # 300 M parameters: about 400 ms
    # 8 hosts of 8 GPUs, 180 GB/s a host, 1.2 GB: 13.3 ms
    assert predict_tree(1.2e9 / 8, 8, Link(180e9 / 8, 0.0)) == pytest.approx(13.3e-3, rel=3e-3)
    assert predict_tree(0, 8, Link(1.0, 1.0)) == 6
    assert predict_tree(1e9, 1, Link(1.0, 1.0)) == 0


def test_hierarchical_all_reduce_worked_by_hand() -> None:
    # in the host 2 * 3/4 * 8 bytes at 1 byte/s, then each GPU's 2 bytes over 2 hosts: 2 * 1/2 * 2 at 0.5 byte/s
    found = predict_all_reduce(8, machine(2, 4, Link(1.0, 0.0), Link(0.5, 0.0)))
    assert found == pytest.approx(CALL_SECONDS + 12 + 4)


def test_one_device_reduces_nothing() -> None:
    assert predict_all_reduce(1e9, make_machine(H100, Topology(1, 1))) == 0


def test_many_ranks_and_few_bytes_take_the_tree() -> None:
    link = Link(1e9, 1e-3)
    found = predict_all_reduce(1e3, machine(64, 1, link, link))
    assert found == pytest.approx(CALL_SECONDS + predict_tree(1e3, 64, link))
    assert found < predict_ring(1e3, 64, link)


@pytest.mark.parametrize(
    ("size_bytes", "flops", "expected"),
    [(3.35e12 * 0.835, 0, 1.0), (0, 989e12 * 0.556, 1.0), (3.35e12 * 0.835, 2 * 989e12 * 0.556, 2.0), (0, 0, 0.0)],
)
def test_kernel_takes_the_longer_of_traffic_and_arithmetic(size_bytes: float, flops: float, expected: float) -> None:
    assert predict_kernel(size_bytes, flops, "bf16", H100) == pytest.approx(expected + LAUNCH_SECONDS)


def test_float32_takes_its_own_rate() -> None:
    assert predict_kernel(0, 67e12 * 0.556, "f32", H100) == pytest.approx(1 + LAUNCH_SECONDS)


def test_the_override_is_that_of_the_slowest_link() -> None:
    assert make_machine(H100, Topology(2, 8), 10).network.bytes_per_second == 10e9
    assert make_machine(H100, Topology(2, 8), 10).nvlink == make_machine(H100, Topology(2, 8)).nvlink
    assert make_machine(H100, Topology(1, 8), 10).nvlink.bytes_per_second == 10e9


def test_topology() -> None:
    assert parse_topology("32x8") == Topology(32, 8)
    for text in ("8", "0x8", "1x", "x8", "1x8x2", "1 x 8", "-1x8", "99999x8"):
        with pytest.raises(ValueError, match="write HOSTSxGPUS"):
            parse_topology(text)
