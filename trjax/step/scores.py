"""Loss and counts of a block of examples."""

import jax
import jax.numpy as jnp
import optax


def score(
    logits: jax.Array, labels: jax.Array, mask: jax.Array, targets: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Scores a block of examples.

    Args:
        logits: float32, shape (examples, classes).
        labels: int32, shape (examples,).
        mask: float32, shape (examples,): examples with 0 count for nothing.
        targets: probabilities in place of the labels, for the cross-entropy; float32, shape (examples, classes).

    Returns:
        Cross-entropy summed over the examples, and the scores: float32 (loss sum, top-1 count, top-5 count,
        example count). Equal logits rank in class order; one that is not a number counts against the example.
    """
    if targets is None:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    else:
        losses = optax.softmax_cross_entropy(logits, targets)
    loss = jnp.where(mask > 0, losses * mask, 0).sum()
    own = jnp.take_along_axis(logits, labels[:, None], 1)
    classes = jnp.arange(logits.shape[1])[None]
    before = classes < labels[:, None]
    beaten = jnp.where(before, logits < own, logits <= own) | (classes == labels[:, None])
    rank = (~beaten).sum(1)
    counts = [(mask * (rank < 1)).sum(), (mask * (rank < 5)).sum(), mask.sum()]
    return loss, jax.lax.stop_gradient(jnp.stack([loss, *counts]))
