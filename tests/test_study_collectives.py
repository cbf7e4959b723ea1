from functools import cache

import jax
import numpy as np
import pytest
import study_collectives
from helpers import noise_block, one_block_chain, reduced_on, spread
from study_collectives import Traffic, count_traffic, double_tree_parents, make_sum, parameter_server, tree

from trjax.cost.algorithms import Link, predict_double_tree, predict_parameter_server, predict_ring, predict_tree
from trjax.mesh import SPLIT, make_mesh, placement
from trjax.models.chain import init_chain
from trjax.step import collectives
from trjax.step.collectives import Launch

COUNTS = [1, 2, 3, 4, 8]
SIZES = [24, 25, 1]  # the least common multiple of the counts, one more, and less than there are devices
LINK = Link(1.0, 1.0)
both = pytest.mark.parametrize("launch", [tree, parameter_server], ids=lambda launch: launch.__name__)


@cache
def compile_sum(launch: Launch, num_devices: int, size: int, hosts: int = 1) -> jax.stages.Compiled:
    mesh = make_mesh(f"0-{num_devices - 1}", hosts)
    return make_sum(launch, mesh).lower(jax.ShapeDtypeStruct((num_devices * size,), np.float32)).compile()


def traffic_of(launch: Launch, num_devices: int, size: int, hosts: int = 1) -> Traffic:
    text = compile_sum(launch, num_devices, size, hosts).as_text()
    assert text is not None
    return count_traffic(text, num_devices, num_devices // hosts)


def check_sum(launch: Launch, num_devices: int, size: int) -> None:
    rows = np.random.default_rng(size).normal(size=(num_devices, size)).astype(np.float32)
    placed = jax.device_put(rows.reshape(-1), placement(make_mesh(f"0-{num_devices - 1}", 1), SPLIT))
    run, expected = (compile_sum(one, num_devices, size)(placed) for one in (launch, collectives.all_reduce))
    found = np.asarray(run).reshape(rows.shape)
    for row in found:
        np.testing.assert_array_equal(row, found[0])  # the same bits everywhere
    np.testing.assert_allclose(found, np.asarray(expected).reshape(rows.shape), atol=1e-6)
    np.testing.assert_allclose(found[0], np.float64(rows).sum(0), atol=2e-6)


@both
@pytest.mark.parametrize("num_devices", COUNTS)
@pytest.mark.parametrize("size", SIZES)
def test_sums_on_every_device(launch: Launch, num_devices: int, size: int) -> None:
    check_sum(launch, num_devices, size)


def test_a_lost_message_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = study_collectives._levels

    def without_the_last(parents: list[int]) -> list:
        *rest, [left, right] = levels(parents)
        return [*rest, [left, right[:-1]]]

    monkeypatch.setattr(study_collectives, "_levels", without_the_last)
    with pytest.raises(AssertionError):
        check_sum(lambda buffer, after: tree(buffer, after), 8, 24)


@pytest.mark.slow
@both
def test_the_gradients_of_the_staged_backward(launch: Launch) -> None:
    chain = one_block_chain()
    params, batch_stats = init_chain(chain, jax.random.key(0), (8, 8, 3))
    arguments = (3, chain, spread(params), batch_stats, noise_block(0, 6))
    found, expected = reduced_on(*arguments, launch=launch), reduced_on(*arguments)
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("world_size", [*range(1, 34), 255, 256, 1000])
def test_double_tree(world_size: int) -> None:
    trees = double_tree_parents(world_size)
    first, second = ({parent for parent in parents if parent >= 0} for parents in trees)
    assert not first & second
    for parents in trees:
        assert parents.count(-1) == 1
        depth = {parents.index(-1): 0}
        while len(depth) < world_size:  # everyone hangs, through others, on the root
            below = {rank: depth[parent] + 1 for rank, parent in enumerate(parents) if parent in depth}
            assert below.keys() - depth.keys()
            depth |= below
        assert max(depth.values()) <= (world_size - 1).bit_length()
        assert max(map(parents.count, range(world_size))) <= 2


@pytest.mark.parametrize("num_devices", COUNTS)
@pytest.mark.parametrize("size", [24, 25])
def test_ring_sends_what_the_formula_says(num_devices: int, size: int) -> None:
    found = traffic_of(collectives.ring, num_devices, size)
    padded = -(-size // num_devices) * num_devices
    expected = predict_ring(4 * padded, num_devices, LINK)
    assert (found.in_host == expected.bytes_per_rank).all()
    assert not found.across.any()
    assert (found.steps, found.calls) == (expected.steps, expected.steps)


@pytest.mark.parametrize("num_devices", COUNTS)
def test_tree_sends_at_most_twice_the_buffer(num_devices: int) -> None:
    found, size_bytes = traffic_of(tree, num_devices, 24), 96
    expected = predict_double_tree(size_bytes, num_devices, LINK)
    assert found.bytes_per_rank == expected.bytes_per_rank <= 2 * size_bytes
    # Every rank but the root sends up, every rank but the root is sent the sum: in all as much as around the ring.
    assert found.in_host.sum() == 2 * (num_devices - 1) * size_bytes
    assert found.steps <= expected.steps
    if num_devices in (2, 4, 8):
        assert found.steps == expected.steps
    assert traffic_of(tree, num_devices, 25).bytes_per_rank <= 2 * 100 + 4  # halves of 12 and 13


def test_one_tree_for_all_would_send_more(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = double_tree_parents(8)
    monkeypatch.setattr(study_collectives, "double_tree_parents", lambda _: (first, first))
    found = traffic_of(lambda buffer, after: tree(buffer, after), 8, 24)
    assert found.bytes_per_rank == predict_tree(96, 8, LINK).bytes_per_rank == 3 * 96


@pytest.mark.parametrize("num_devices", COUNTS)
def test_parameter_server_sends_all_from_one_rank(num_devices: int) -> None:
    found, size_bytes = traffic_of(parameter_server, num_devices, 25), 100
    assert found.in_host[0] == (num_devices - 1) * size_bytes
    assert (found.in_host[1:] == size_bytes).all()
    apart = predict_parameter_server(size_bytes, num_devices, LINK)  # whose server is none of the ranks
    assert found.steps == apart.steps
    assert found.in_host[0] == max(0.0, apart.root_bytes - size_bytes)


@pytest.mark.parametrize(("hosts", "local"), [(1, 8), (2, 4), (4, 2), (8, 1), (3, 2)])
def test_hierarchical_sends_a_part_to_other_hosts(hosts: int, local: int) -> None:
    found, size_bytes = traffic_of(collectives.hierarchical, hosts * local, 24, hosts), 96
    np.testing.assert_allclose(found.in_host, 2 * (local - 1) / local * size_bytes)
    np.testing.assert_allclose(found.across, 2 * (hosts - 1) / hosts * size_bytes / local)
    assert found.steps == 2 * (local - 1) + 2 * (hosts - 1)
    flat = traffic_of(collectives.ring, hosts * local, 24, hosts)
    assert flat.bytes_per_rank == pytest.approx(found.bytes_per_rank)
    assert (flat.across > 0).sum() == (hosts if hosts > 1 else 0) or local == 1  # the last GPU of every host
