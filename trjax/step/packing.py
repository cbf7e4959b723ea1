"""Tensors into a group's buffer and back: the way that every gradient goes."""

from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from trjax.step.buckets import RegionKind
from trjax.step.plan import Group, Region
from trjax.step.spec import GradientPlan

STATISTICS = (RegionKind.B_NEXT_MEAN, RegionKind.B_NEXT_VAR)


def _concatenate(pieces: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([piece for piece in pieces if piece.size], -1)


def _physical(region: Region, leaf: jax.Array) -> jax.Array:
    """Returns a tensor as it lies in memory, 1-D."""
    return leaf.transpose(region.physical_order).reshape(-1)


def _logical(region: Region, flat: jax.Array) -> jax.Array:
    physical = flat.reshape([region.shape[dim] for dim in region.physical_order])
    return physical.transpose(sorted(range(len(region.shape)), key=region.physical_order.__getitem__))


def split_shards(region: Region, leaf: jax.Array, shards: int) -> jax.Array:
    """Returns a tensor as it lies in the shards, shape (shards, shard_elements), padded with zeros.

    Of `R_RESULT` every shard holds the whole.
    """
    flat = _physical(region, leaf)
    if region.kind is RegionKind.R_RESULT:
        return jnp.broadcast_to(flat, (shards, flat.size))
    return jnp.pad(flat, (0, shards * region.shard_elements - flat.size)).reshape(shards, -1)


def join_shards(region: Region, rows: jax.Array) -> jax.Array:
    """Returns the tensor, in its logical shape, of what lies in the shards: the inverse of `split_shards`."""
    whole = rows[0] if region.kind is RegionKind.R_RESULT else rows.reshape(-1)[: region.size_elements]
    return _logical(region, whole)


def _tile(group: Group, pieces: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Returns what lies in a buffer, or in each of its shards, in memory order: two arrays a region, and the end.

    Before every region's piece, shape (..., shard_elements), lie the zeros of its alignment; zeros fill up the end.
    """
    first = next(iter(pieces.values()))
    zeros = lambda elements: jnp.zeros((*first.shape[:-1], elements), first.dtype)  # noqa: E731
    parts, end = [], 0
    for region in group.regions:
        parts += [zeros(region.offset_elements - end), pieces[region.name]]
        end = region.offset_elements + region.shard_elements
    return [*parts, zeros(group.size_elements // group.shards - end)]


def pack(group: Group, leaves: Mapping[str, jax.Array], share: jax.Array | float = 1.0, dtype: str = "") -> jax.Array:
    """Returns the group's buffer, 1-D, with every region's tensor in its physical order at its offset.

    On a GPU the concatenation writes straight into the buffer that the AllReduce works on, and casts on the way.

    Args:
        group: where the tensors go.
        leaves: tensors by name.
        share: weight of this device's BatchNorm statistics in the sum, float32, shape ().
        dtype: of the buffer, in place of the group's.
    """

    def piece(region: Region) -> jax.Array:
        leaf = leaves[region.name]
        laid_out = _physical(region, leaf) if group.shards == 1 else split_shards(region, leaf, group.shards)
        return laid_out.astype(dtype or group.dtype)

    parts = _tile(group, {region.name: piece(region) for region in group.regions})
    num_statistics = sum(region.kind in STATISTICS for region in group.regions)
    if not num_statistics:
        return _concatenate(parts).reshape(-1)
    # Weighted as one vector: XLA splits concatenations of more than 128 arrays, and would move the gradients twice.
    split = 2 * (len(group.regions) - num_statistics)  # they are the last regions
    return _concatenate([*parts[:split], _concatenate(parts[split:]) * share]).reshape(-1)


def slice_regions(group: Group, buffer: jax.Array) -> dict[str, jax.Array]:
    """Returns what a buffer (or one shard of it) holds of each region, by name, as it lies there.

    Args:
        group: where the tensors are.
        buffer: shape (..., elements of a shard).
    """
    ends = {region: region.offset_elements + region.shard_elements for region in group.regions}
    return {
        region.name: jax.lax.slice_in_dim(buffer, region.offset_elements, end, axis=-1) for region, end in ends.items()
    }


def unpack(group: Group, buffer: jax.Array) -> dict[str, jax.Array]:
    """Returns the tensors of a group by name, in their logical shapes: the inverse of `pack`."""
    if group.shards == 1:
        pieces = slice_regions(group, buffer)
        return {region.name: _logical(region, pieces[region.name]) for region in group.regions}
    pieces = slice_regions(group, buffer.reshape(group.shards, -1))
    return {region.name: join_shards(region, pieces[region.name]) for region in group.regions}


def all_finite(buffers: Iterable[jax.Array]) -> jax.Array:
    """Returns whether no element of any buffer is infinite or not a number: bool, shape ()."""
    return jnp.stack([jnp.isfinite(buffer).all() for buffer in buffers]).all()


def pack_shard(group: Group, pieces: Mapping[str, jax.Array]) -> jax.Array:
    """Returns one shard of the buffer, 1-D, from the parts of its tensors: the inverse of `slice_regions`.

    Args:
        group: where the tensors go.
        pieces: shape (shard_elements,) each, by name.
    """
    return _concatenate(_tile(group, pieces))


def check_finite(sums: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
    """Checks all sums, and leaves the last of them waiting until the others have been checked.

    Every update waits for the last group, and nothing but that check is left to overlap with its reduction.

    Returns:
        The sums by group, and whether all of them are finite: bool, shape ().
    """
    *names, last = sums
    if not names:
        return dict(sums), all_finite(sums.values())
    others = all_finite(sums[name] for name in names)
    waiting, others = jax.lax.optimization_barrier((sums[last], others))
    return {**sums, last: waiting}, others & all_finite([waiting])


def unpack_means(how: GradientPlan, sums: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns every region's tensor, or this device's shard of it, from the summed buffers.

    Where padding leaves fewer than `global_batch` examples, a factor `global_batch / count`, with the count from the
    results, makes a sum the mean over the real ones. XLA fuses it into the update.

    Args:
        how: the plan, and the global batch.
        sums: the buffer of every group, summed over the devices.

    Returns:
        Tensors by the name of their region, bitwise the same on all devices: `results` is the sum over the devices,
        everything else the mean over the real examples.
    """
    exact = {"results"}
    if how.statistics == "first":
        exact |= {region.name for region in how.plan.regions if region.kind in STATISTICS}
    take = slice_regions if how.sharded else unpack
    buffers = [(group, sums[group.name].astype(jnp.float32)) for group in how.plan.groups]
    unscaled = {name: leaf for pair in buffers for name, leaf in take(*pair).items() if name in exact}
    scale = how.global_batch / jnp.maximum(unscaled["results"][3], 1)
    # Scaled before it is cut: XLA then updates the small leaves in a few kernels, not one for each.
    means = {name: leaf for group, buffer in buffers for name, leaf in take(group, buffer * scale).items()}
    return means | unscaled
