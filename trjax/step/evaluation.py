"""The two compiled programs of an evaluation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from trjax.data.batches import Batch
from trjax.mesh import REPLICATED, SPLIT, fill, placement
from trjax.models.batchnorm import fold_batchnorm
from trjax.models.chain import Chain, evaluate_chain
from trjax.step import collectives
from trjax.step.plan import NUM_SCORES
from trjax.step.scores import score
from trjax.xla.options import CompileOptions


def evaluate_folded(chain: Chain, params: Any, batch_stats: Any, x: jax.Array, flip: bool) -> jax.Array:
    """Returns the logits of a block of examples, with BatchNorm folded into its scale and bias first.

    Args:
        chain: the model.
        params: `{segment: tree}`.
        batch_stats: likewise.
        x: preprocessed images, shape (examples, height, width, channels).
        flip: the mean of an image's logits and its mirror image's.
    """
    folded, rest = fold_batchnorm(params, batch_stats)
    logits = evaluate_chain(chain, folded, rest, x)
    if flip:
        logits = (logits + evaluate_chain(chain, folded, rest, x[:, :, ::-1])) / 2
    return logits


def make_evaluation(
    chain: Chain,
    preprocess: Callable[[jax.Array], jax.Array],
    mesh: Mesh,
    formats: Any,
    flip: bool = False,
    options: CompileOptions | None = None,
) -> Any:
    """Returns the two programs of an evaluation: `accumulate` and `reduce_totals`.

    `accumulate(totals, params, batch_stats, batch) -> totals` adds a batch's scores to each device's own
    totals, float32, shape (devices, 4); it folds BatchNorm first, and communicates nothing.
    `reduce_totals(totals) -> scores` sums them over the devices, shape (4,): the one AllReduce.
    Counts are exact below 2^24 examples a device.

    Args:
        chain: the model.
        preprocess: maps uint8 images to the network's input.
        mesh: the devices.
        formats: of the state, `StateLayouts.formats`.
        flip: score the mean of an image's logits and its mirror image's.
        options: to compile with.
    """

    def accumulate(totals: jax.Array, params: Any, batch_stats: Any, block: Batch) -> jax.Array:
        logits = evaluate_folded(chain, params, batch_stats, preprocess(jnp.asarray(block.images)), flip)
        return totals + score(logits, block.labels, block.mask)[1][None]

    def reduce_totals(totals: jax.Array) -> jax.Array:
        return collectives.sum_results(totals[0])

    compile_over = partial(jax.jit, compiler_options=options)
    split, whole = placement(mesh, SPLIT), placement(mesh, REPLICATED)
    specs = (SPLIT, REPLICATED, REPLICATED, SPLIT)
    return (
        compile_over(
            jax.shard_map(accumulate, mesh=mesh, in_specs=specs, out_specs=SPLIT),
            in_shardings=(split, formats.params, formats.batch_stats, split),
            out_shardings=split,
            donate_argnums=0,
        ),
        compile_over(
            jax.shard_map(reduce_totals, mesh=mesh, in_specs=SPLIT, out_specs=REPLICATED),
            in_shardings=(split,),
            out_shardings=whole,
        ),
    )


def init_totals(mesh: Mesh) -> jax.Array:
    """Returns the zero totals of an evaluation, float32, shape (devices, 4), one row on each device."""
    return fill(mesh, (mesh.size, NUM_SCORES), 0.0)
