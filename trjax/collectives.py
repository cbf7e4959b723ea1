"""The only file that talks to other devices. Every function is called inside `jax.shard_map` over the mesh."""

from typing import Any

import jax

from trjax.mesh import AXIS


def vary(tree: Any) -> Any:
    """Marks replicated arrays as differing between devices, so that their gradients stay local.

    Without it `jax.grad` inside `shard_map` already sums the gradients of replicated parameters, and the
    explicit sum would multiply them by the number of devices.
    """
    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, AXIS, to="varying"), tree)


def sum_group(buffer: jax.Array, after: jax.Array | None) -> jax.Array:
    """Sums one group's buffer over the devices, and starts no sooner than `after`, the previous group, is done.

    One AllReduce of the whole buffer, in its dtype (float32) and in place, of the plan's `Group.size_bytes`: for
    ResNet-50 93.8 MB (`deep`), then 8.7 MB (`first`). The tie to the previous group leaves the scheduler one legal
    order, the order of readiness, with the rest of the backward between the two; it also keeps the combiner
    from merging a small `deep` into a late `first`.
    """
    if after is not None:
        _, buffer = jax.lax.optimization_barrier((after, buffer))
    return jax.lax.psum(buffer, AXIS)


def sum_moments(moments: jax.Array) -> jax.Array:
    """Sums the packed BatchNorm moments of one layer over the devices.

    Two AllReduces a layer, both float32: 2 x channels + 1 in the forward (count, two moments), 2 x channels in the
    backward (the sums of the cotangent). The normalisation waits for both: nothing can hide them.
    """
    return vary(jax.lax.psum(moments, AXIS))


def sum_results(totals: jax.Array) -> jax.Array:
    """Sums the totals of an evaluation over the devices: one AllReduce of 16 bytes, once an evaluation."""
    return jax.lax.psum(totals, AXIS)


def device_index() -> jax.Array:
    """Returns this device's position on the mesh, int32."""
    return jax.lax.axis_index(AXIS)
