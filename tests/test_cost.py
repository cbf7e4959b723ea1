import pytest

from trjax.cost.algorithms import (
    Link,
    predict_double_tree,
    predict_parameter_server,
    predict_reduce_scatter,
    predict_ring,
    predict_tree,
    predict_zero1,
    predict_zero3,
)
from trjax.cost.collectives import (
    CALL_SECONDS,
    predict_algorithms,
    predict_all_reduce,
    predict_efficiency,
    predict_speedup,
)
from trjax.cost.kernels import LAUNCH_SECONDS, predict_kernel
from trjax.cost.machines import Machine, Topology, flat_link, make_machine, parse_topology
from trjax.cost.targets import TARGETS

pytestmark = pytest.mark.fast

GIB = 2**30
H100 = TARGETS["h100"]


def machine(hosts: int, gpus: int, nvlink: Link, network: Link) -> Machine:
    return Machine(H100, Topology(hosts, gpus), nvlink, network)


def test_ring_of_8_ranks_1_gib_25_gib_a_second() -> None:
    found = predict_ring(GIB, 8, Link(25 * GIB, 0.0))
    assert found.bytes_per_rank == 1.75 * GIB
    assert found.steps == 14
    assert found.seconds * 1e3 == pytest.approx(70, rel=1e-12)
    assert predict_ring(0, 8, Link(1.0, 1.0)).seconds == 14


def test_ring_from_8_to_64_ranks() -> None:
    few, many = (predict_ring(GIB, ranks, Link(25 * GIB, 0.0)) for ranks in (8, 64))
    assert (few.bytes_per_rank, many.bytes_per_rank) == (1.75 * GIB, 1.96875 * GIB)
    assert many.bytes_per_rank / few.bytes_per_rank == 1.125
    assert many.seconds / few.seconds == pytest.approx(1.125, rel=1e-12)
    assert (few.steps, many.steps, many.steps / few.steps) == (14, 126, 9)


def test_300_million_parameters_take_400_ms_behind_6_gb_a_second() -> None:
    link = Link(6e9, 0.0)
    assert predict_double_tree(300e6 * 4, 1024, link).seconds == 0.4  # 2 S / B
    # the ring comes close from below: 1023/1024 of it
    assert predict_ring(1.2e9, 1024, link).seconds == pytest.approx(0.4 * 1023 / 1024, rel=1e-12)


def test_8_hosts_of_8_a100() -> None:
    # 8 ports of 200 Gb/s a host, of which 90 % is reached: 180 GB/s
    link = Link(200e9 / 8, 0.0, efficiency=0.9, channels=8)
    assert link.reached_bytes_per_second == 180e9
    ideal = predict_double_tree(1.2e9, 64, link)
    assert ideal.bytes_per_rank == 2.4e9
    assert ideal.seconds == pytest.approx(2.4 / 180, rel=1e-12)
    assert round(ideal.seconds * 1e3, 1) == 13.3


def test_256_gpus_slowed_down_by_100_percent_do_the_work_of_128() -> None:
    assert predict_speedup(256, 0.25, 0.25) == 128
    assert predict_efficiency(0.25, 0.25) == 0.5
    assert predict_efficiency(0.25, 0.0) == 1


def test_the_table_of_systems_worked_by_hand() -> None:
    # 8 ranks, 80 bytes, 10 bytes a second, a second of latency a message
    link = Link(10.0, 1.0)
    server, tree, trees = (f(80, 8, link) for f in (predict_parameter_server, predict_tree, predict_double_tree))
    assert (server.bytes_per_rank, server.root_bytes, server.steps, server.seconds) == (80, 640, 2, 2 * (1 + 64))
    assert (tree.bytes_per_rank, tree.steps, tree.seconds) == (240, 6, 6 * (1 + 8))
    assert (trees.bytes_per_rank, trees.steps, trees.seconds) == (160, 6, 6 + 16)
    half, zero1, zero3 = (f(80, 8, link) for f in (predict_reduce_scatter, predict_zero1, predict_zero3))
    assert (half.bytes_per_rank, half.steps, half.seconds, half.calls) == (70, 7, 14, 1)
    assert (zero1.bytes_per_rank, zero1.steps, zero1.seconds, zero1.calls) == (140, 14, 28, 2)
    assert (zero3.bytes_per_rank, zero3.steps, zero3.seconds, zero3.calls) == (210, 21, 42, 3)


def test_hierarchical_all_reduce_worked_by_hand() -> None:
    # in the host 2 * 3/4 * 8 bytes at 1 byte/s, then each GPU's 2 bytes over 2 hosts: 2 * 1/2 * 2 at 0.5 byte/s
    found = predict_all_reduce(8, machine(2, 4, Link(1.0, 0.0), Link(0.5, 0.0)))
    assert found == pytest.approx(CALL_SECONDS + 12 + 4)


def test_one_device_reduces_nothing() -> None:
    assert predict_all_reduce(1e9, make_machine(H100, Topology(1, 1))) == 0


def test_many_ranks_and_few_bytes_take_the_tree() -> None:
    link = Link(1e9, 1e-3)
    found = predict_all_reduce(1e3, machine(64, 1, link, link))
    assert found == pytest.approx(CALL_SECONDS + predict_double_tree(1e3, 64, link).seconds)
    assert found < predict_ring(1e3, 64, link).seconds


def test_without_hosts_the_slowest_link_sets_the_pace() -> None:
    nvlink, network = Link(100.0, 1.0), Link(25.0, 3.0)
    assert flat_link(machine(1, 8, nvlink, network)) == nvlink
    assert flat_link(machine(2, 8, nvlink, network)) == Link(25.0, 3.0)
    assert flat_link(machine(2, 8, nvlink, network), channels=3) == Link(75.0, 3.0)
    assert flat_link(machine(2, 8, nvlink, network), channels=8) == Link(100.0, 3.0)


def test_all_algorithms_of_one_machine() -> None:
    two_hosts = machine(2, 4, Link(1.0, 0.0), Link(0.5, 0.0))
    found = predict_algorithms(8, two_hosts)
    slowest = Link(0.5, 0.0)
    assert found["parameter server"] == predict_parameter_server(8, 8, slowest)
    assert found["ring"] == predict_ring(8, 8, slowest)
    assert found["binary tree"] == predict_tree(8, 8, slowest)
    assert found["double binary tree"] == predict_double_tree(8, 8, slowest)
    assert found["ZeRO-1, ZeRO-2"] == predict_zero1(8, 8, slowest)
    assert found["ZeRO-3, FSDP"] == predict_zero3(8, 8, slowest)
    rings, trees = found["hierarchical, rings"], found["hierarchical, trees"]
    assert (rings.bytes_per_rank, rings.steps, rings.seconds) == (12 + 2, 6 + 2, 12 + 4)
    assert (trees.bytes_per_rank, trees.steps, trees.seconds) == (12 + 2, 6 + 2, 12 + 8)
    assert predict_all_reduce(8, two_hosts) == CALL_SECONDS + 16


@pytest.mark.parametrize(
    ("size_bytes", "flops", "expected"),
    [(3.35e12 * 0.835, 0, 1.0), (0, 989e12 * 0.556, 1.0), (3.35e12 * 0.835, 2 * 989e12 * 0.556, 2.0), (0, 0, 0.0)],
)
def test_kernel_takes_the_longer_of_traffic_and_arithmetic(size_bytes: float, flops: float, expected: float) -> None:
    assert predict_kernel(size_bytes, flops, "bf16", H100) == pytest.approx(expected + LAUNCH_SECONDS)


def test_float32_takes_its_own_rate() -> None:
    assert predict_kernel(0, 67e12 * 0.556, "f32", H100) == pytest.approx(1 + LAUNCH_SECONDS)


def test_the_override_is_that_of_the_slowest_link() -> None:
    assert make_machine(H100, Topology(2, 8), 10).network.reached_bytes_per_second == 10e9
    assert make_machine(H100, Topology(2, 8), 10).nvlink == make_machine(H100, Topology(2, 8)).nvlink
    assert make_machine(H100, Topology(1, 8), 10).nvlink.reached_bytes_per_second == 10e9
    assert make_machine(H100, Topology(2, 8)).network.reached_bytes_per_second == 0.8 * 50e9


def test_topology() -> None:
    assert parse_topology("32x8") == Topology(32, 8)
    for text in ("8", "0x8", "1x", "x8", "1x8x2", "1 x 8", "-1x8", "99999x8"):
        with pytest.raises(ValueError, match="write HOSTSxGPUS"):
            parse_topology(text)
