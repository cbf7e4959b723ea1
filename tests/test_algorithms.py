import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trjax.cost.algorithms import (
    Algorithm,
    Link,
    predict_all_gather,
    predict_double_tree,
    predict_hierarchical,
    predict_parameter_server,
    predict_reduce_scatter,
    predict_ring,
    predict_tree,
    predict_zero1,
    predict_zero3,
)

pytestmark = pytest.mark.fast

FLAT = [predict_parameter_server, predict_reduce_scatter, predict_all_gather, predict_ring]
FLAT += [predict_tree, predict_double_tree, predict_zero1, predict_zero3]
RANKS = st.integers(2, 4096)
SIZES = st.floats(1, 1e10)
LINKS = st.builds(Link, st.floats(1e6, 1e12), st.floats(1e-6, 1e-2), st.floats(0.1, 1.0), st.integers(1, 8))
every_flat = pytest.mark.parametrize("predict", FLAT, ids=lambda predict: predict.__name__)


@every_flat
@given(size_bytes=SIZES, world_size=RANKS, link=LINKS)
def test_more_bytes_or_a_worse_link_cost_more(
    predict: Algorithm, size_bytes: float, world_size: int, link: Link
) -> None:
    found, double = predict(size_bytes, world_size, link), predict(2 * size_bytes, world_size, link)
    assert double.bytes_per_rank == pytest.approx(2 * found.bytes_per_rank)
    assert double.steps == found.steps
    assert found.seconds < double.seconds <= 2 * found.seconds  # the latency does not double
    slower = Link(link.bytes_per_second / 2, link.latency_seconds, link.efficiency, link.channels)
    assert predict(size_bytes, world_size, slower).seconds == pytest.approx(
        double.seconds, rel=1e-9
    )  # half the rate is twice the bytes
    later = Link(link.bytes_per_second, 2 * link.latency_seconds, link.efficiency, link.channels)
    expected = found.seconds + found.steps * link.latency_seconds
    assert predict(size_bytes, world_size, later).seconds == pytest.approx(expected)


@every_flat
@given(size_bytes=SIZES, world_size=RANKS, link=LINKS)
def test_a_rank_more_never_costs_less(predict: Algorithm, size_bytes: float, world_size: int, link: Link) -> None:
    found, more = predict(size_bytes, world_size, link), predict(size_bytes, world_size + 1, link)
    assert more.bytes_per_rank >= found.bytes_per_rank * (1 - 1e-12)
    assert more.steps >= found.steps
    assert more.seconds >= found.seconds * (1 - 1e-12)


@every_flat
def test_one_rank_sends_nothing(predict: Algorithm) -> None:
    found = predict(1e9, 1, Link(1.0, 1.0))
    assert (found.bytes_per_rank, found.steps, found.seconds, found.root_bytes) == (0, 0, 0, 0)


@given(size_bytes=SIZES, world_size=RANKS, link=LINKS)
def test_no_algorithm_sends_less_than_the_ring(size_bytes: float, world_size: int, link: Link) -> None:
    # 2 (N-1)/N S is the least for a sum that ranks of equal part make and get: Patarasuk and Yuan, 2009
    least = predict_ring(size_bytes, world_size, link).bytes_per_rank
    assert least == pytest.approx(2 * (world_size - 1) / world_size * size_bytes)
    assert predict_tree(size_bytes, world_size, link).bytes_per_rank >= least * (1 - 1e-12)
    assert least * (1 - 1e-12) <= predict_double_tree(size_bytes, world_size, link).bytes_per_rank <= 2 * size_bytes
    server = predict_parameter_server(size_bytes, world_size, link)
    assert server.bytes_per_rank < least or world_size == 2  # the server sends in the ranks' place
    assert server.root_bytes == world_size * size_bytes


@given(size_bytes=SIZES, world_size=RANKS, link=LINKS)
def test_zero_is_the_ring_cut_in_two_and_half_as_much_again(size_bytes: float, world_size: int, link: Link) -> None:
    ring, one, three = (f(size_bytes, world_size, link) for f in (predict_ring, predict_zero1, predict_zero3))
    assert (one.bytes_per_rank, one.steps, one.seconds) == (ring.bytes_per_rank, ring.steps, ring.seconds)
    assert (ring.calls, one.calls, three.calls) == (1, 2, 3)
    assert three.bytes_per_rank == pytest.approx(1.5 * ring.bytes_per_rank)
    assert three.seconds == pytest.approx(1.5 * ring.seconds)
    assert 2 * three.steps == 3 * ring.steps


@given(size_bytes=SIZES, world_size=RANKS, link=LINKS, other=LINKS)
def test_hierarchical_on_one_host_is_its_ring(size_bytes: float, world_size: int, link: Link, other: Link) -> None:
    assert predict_hierarchical(size_bytes, 1, world_size, link, other) == predict_ring(size_bytes, world_size, link)
    assert predict_hierarchical(size_bytes, world_size, 1, other, link) == predict_ring(size_bytes, world_size, link)


@given(size_bytes=SIZES, hosts=st.integers(2, 64), gpus=st.integers(2, 16), link=LINKS)
def test_hierarchical_sends_what_the_ring_sends_in_fewer_steps(
    size_bytes: float, hosts: int, gpus: int, link: Link
) -> None:
    ring = predict_ring(size_bytes, hosts * gpus, link)
    found = predict_hierarchical(size_bytes, hosts, gpus, link, link)
    # (n-1)/n + (M-1)/(M n) = (M n - 1)/(M n): on equal links only latency is saved
    assert found.bytes_per_rank == pytest.approx(ring.bytes_per_rank)
    assert found.steps == 2 * (gpus - 1 + hosts - 1) < ring.steps
    saved = (ring.steps - found.steps) * link.latency_seconds
    assert ring.seconds - found.seconds == pytest.approx(saved, rel=1e-6, abs=1e-9 * ring.seconds)


@given(world_size=st.integers(4, 4096), link=LINKS)
def test_double_tree_wins_below_the_crossover_and_the_ring_above(world_size: int, link: Link) -> None:
    # 2 (N-1) (a + S / (N B)) = 2 L a + 2 S / B, with L = log2 N rounded up: S = a B N (N - 1 - L)
    levels = math.ceil(math.log2(world_size))
    rate = link.reached_bytes_per_second
    crossover = link.latency_seconds * rate * world_size * (world_size - 1 - levels)
    for factor, ring_is_slower in ((0.99, True), (1.01, False)):
        ring = predict_ring(factor * crossover, world_size, link).seconds
        trees = predict_double_tree(factor * crossover, world_size, link).seconds
        assert (ring > trees) is ring_is_slower


@given(world_size=st.integers(4, 4096), link=LINKS)
def test_one_tree_is_fast_for_small_messages_only(world_size: int, link: Link) -> None:
    # 2 (N-1) (a + S / (N B)) = 2 L (a + S / B): S = a B (N - 1 - L) / (L - (N-1)/N)
    levels = math.ceil(math.log2(world_size))
    share = levels - (world_size - 1) / world_size
    crossover = link.latency_seconds * link.reached_bytes_per_second * (world_size - 1 - levels) / share
    for factor, ring_is_slower in ((0.99, True), (1.01, False)):
        ring = predict_ring(factor * crossover, world_size, link).seconds
        assert (ring > predict_tree(factor * crossover, world_size, link).seconds) is ring_is_slower


@given(size_bytes=SIZES, world_size=RANKS, link=LINKS)
def test_two_trees_are_never_slower_than_one(size_bytes: float, world_size: int, link: Link) -> None:
    one, two = predict_tree(size_bytes, world_size, link), predict_double_tree(size_bytes, world_size, link)
    assert two.steps == one.steps
    assert two.seconds <= one.seconds * (1 + 1e-12)


@pytest.mark.parametrize(
    ("world_size", "sent", "sent_by_two"), [(2, 1, 1), (3, 2, 1.5), (4, 2, 1.5), (5, 3, 2), (8, 3, 2), (4096, 3, 2)]
)
def test_inner_ranks_of_small_trees_send_less(world_size: int, sent: float, sent_by_two: float) -> None:
    link = Link(1.0, 0.0)
    assert predict_tree(1.0, world_size, link).bytes_per_rank == sent
    assert predict_double_tree(1.0, world_size, link).bytes_per_rank == sent_by_two


def test_a_server_is_fastest_where_only_latency_counts() -> None:
    link = Link(1e9, 1e-6)
    assert predict_parameter_server(1, 64, link).seconds < predict_double_tree(1, 64, link).seconds
    assert predict_parameter_server(1e9, 64, link).seconds > 30 * predict_ring(1e9, 64, link).seconds


@pytest.mark.parametrize(("hosts", "gpus"), [(2, 8), (8, 8), (512, 8)])
def test_hierarchical_wins_where_the_network_is_slow(hosts: int, gpus: int) -> None:
    nvlink, network = Link(350e9, 1e-6), Link(25e9, 5e-6)
    found = predict_hierarchical(1e9, hosts, gpus, nvlink, network)
    assert found.seconds < predict_ring(1e9, hosts * gpus, network).seconds / 2
