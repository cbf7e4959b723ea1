"""The only file that talks to other devices. Every function is called inside `jax.shard_map` over the mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from trjax.mesh import AXIS, HOSTS, LOCAL

Launch = Callable[[jax.Array, jax.Array | None], jax.Array]
"""Sums a group's buffer, 1-D, over the devices, no sooner than the previous group's sum (None: the first) is there."""


def vary(tree: Any) -> Any:
    """Marks replicated arrays as differing between devices, so that their gradients stay local.

    Without it `jax.grad` inside `shard_map` already sums the gradients of replicated parameters, and the
    explicit sum would multiply them by the number of devices.
    """
    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, AXIS, to="varying"), tree)


def _tie(buffer: jax.Array, after: jax.Array | None) -> jax.Array:
    """Returns a buffer that is there no sooner than `after`.

    The tie leaves the scheduler one legal order, the order of readiness, with the rest of the backward between two
    groups; it also keeps the combiner from merging a small `deep` into a late `first`.
    """
    return buffer if after is None else jax.lax.optimization_barrier((after, buffer))[1]


def _pad(buffer: jax.Array, parts: int) -> jax.Array:
    """Returns the buffer with zeros at its end, in `parts` equal rows."""
    return jnp.pad(buffer, (0, -buffer.size % parts)).reshape(parts, -1)


def all_reduce(buffer: jax.Array, after: jax.Array | None) -> jax.Array:
    """Sums a group over the devices: one AllReduce of the whole buffer, in its dtype and in place.

    The plan's `Group.size_bytes`: for ResNet-50 93.8 MB (`deep`), then 8.7 MB (`first`), both float32.
    """
    return jax.lax.psum(_tie(buffer, after), AXIS)


def all_reduce_untied(buffer: jax.Array, _after: jax.Array | None) -> jax.Array:
    """Sums a group whenever the compiler likes, together with others if it likes: what ordinary programs do."""
    return jax.lax.psum(buffer, AXIS)


def reduce_scatter(buffer: jax.Array, after: jax.Array | None) -> jax.Array:
    """Returns this device's shard of the sum: one ReduceScatter, (N-1)/N of the buffer each way."""
    return jax.lax.psum_scatter(_tie(buffer, after), AXIS, tiled=True)


def all_gather(shard: jax.Array, after: jax.Array | None) -> jax.Array:
    """Returns the buffer of all devices' shards, the same on all: one AllGather, (N-1)/N of the buffer each way."""
    return jax.lax.all_gather(_tie(shard, after), AXIS, tiled=True, to="invarying")


def hierarchical(buffer: jax.Array, after: jax.Array | None) -> jax.Array:
    """Sums inside each host, then across, so that only 1/n of the data leaves each of a host's n devices.

    ReduceScatter over the devices of the host, AllReduce of the shard with the same device of the other hosts,
    AllGather inside the host.
    """
    rows = _pad(_tie(buffer, after), jax.lax.axis_size(LOCAL))
    shard = jax.lax.psum(jax.lax.psum_scatter(rows, LOCAL), HOSTS)
    return jax.lax.all_gather(shard, LOCAL, to="invarying").reshape(-1)[: buffer.size]


def ring(buffer: jax.Array, after: jax.Array | None) -> jax.Array:
    """Sums by a ring, written out: 2 (N-1) messages of 1/N of the buffer from each rank to its right neighbour.

    ReduceScatter: at step t rank r sends chunk r - t, and adds chunk r - t - 1 that it receives. AllGather: at step t
    it sends chunk r - t + 1, complete, and puts chunk r - t that it receives in its place. Every chunk is summed once,
    along the ring, so that all ranks hold the same bits; `shard_map` cannot see that (`check_vma=False`).

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    world_size, rank = jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)
    right = [(source, (source + 1) % world_size) for source in range(world_size)]
    chunks = _pad(_tie(buffer, after), world_size)

    def pass_on(chunks: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.ppermute(chunks[index % world_size], AXIS, right)

    for step in range(world_size - 1):
        chunks = chunks.at[(rank - step - 1) % world_size].add(pass_on(chunks, rank - step))
    for step in range(world_size - 1):
        chunks = chunks.at[(rank - step) % world_size].set(pass_on(chunks, rank - step + 1))
    return chunks.reshape(-1)[: buffer.size]


def sum_moments(moments: jax.Array) -> jax.Array:
    """Sums the packed BatchNorm moments of one layer over the devices.

    Two AllReduces a layer, both float32: 2 x channels + 1 in the forward (count, two moments), 2 x channels in the
    backward (the sums of the cotangent). The normalisation waits for both: nothing can hide them.
    """
    return vary(jax.lax.psum(moments, AXIS))


def sum_norms(squares: jax.Array) -> jax.Array:
    """Sums the squares of norms over the devices that hold the shards: one AllReduce of some 100 bytes to 1 KB."""
    return vary(jax.lax.psum(squares, AXIS))


def sum_results(totals: jax.Array) -> jax.Array:
    """Sums the totals of an evaluation over the devices: one AllReduce of 16 bytes, once an evaluation."""
    return jax.lax.psum(totals, AXIS)


def device_index() -> jax.Array:
    """Returns this device's position on the mesh, int32."""
    return jax.lax.axis_index(AXIS)
