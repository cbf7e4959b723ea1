"""Optimizers for a learning rate of one, and the learning rate of every step.

The rate is an input of the compiled step, never a constant in it: another rate needs no other program.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trjax.config.run import OptimConfig

# optax's LARS, LAMB and clipping take norms of what one device holds; here they sum over the shards of zero1.
Sum = Callable[[jax.Array], jax.Array]
"""Adds up a float32 vector of squares over the devices on which the shards of the parameters lie."""


def _whole(squares: jax.Array) -> jax.Array:
    return squares


def _squares(tree: Any) -> list[jax.Array]:
    return [(leaf * leaf).sum() for leaf in jax.tree.leaves(tree)]


def _norms(updates: Any, params: Any, sum_shards: Sum) -> jax.Array:
    """Returns the length of every leaf of both trees, shape (2, leaves)."""
    return jnp.sqrt(sum_shards(jnp.stack(_squares(updates) + _squares(params))).reshape(2, -1))


def clip_by_global_norm(longest: float, sum_shards: Sum = _whole) -> optax.GradientTransformation:
    """Shortens gradients to `longest`, the length of all of them taken as one vector, if they are longer."""

    def update(updates: Any, state: Any, _params: Any = None) -> tuple[Any, Any]:
        norm = jnp.sqrt(sum_shards(jnp.stack(_squares(updates)).sum(keepdims=True))[0])
        factor = longest / jnp.maximum(norm, longest)
        return jax.tree.map(lambda leaf: factor * leaf, updates), state

    return optax.GradientTransformation(lambda _params: optax.EmptyState(), update)


def scale_by_lars(
    trust: float, weight_decay: float, mask: Any, sum_shards: Sum = _whole
) -> optax.GradientTransformation:
    """Gives every layer a rate of its own: `trust |w| / (|g| + weight_decay |w|)`, times `g + weight_decay w`.

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017.

    Args:
        trust: the paper's coefficient.
        weight_decay: strength of the decay.
        mask: tree of bools; parameters with False keep their gradient, undecayed.
        sum_shards: adds up squares where a device has a part of each parameter only.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        gradient_norms, param_norms = _norms(updates, params, sum_shards)
        both = (gradient_norms > 0) & (param_norms > 0)
        rates = jnp.where(both, trust * param_norms / (gradient_norms + weight_decay * param_norms), 1.0)
        leaves, structure = jax.tree.flatten(updates)
        scaled = [
            rate * (gradient + weight_decay * param) if decayed else gradient
            for rate, gradient, param, decayed in zip(
                rates, leaves, jax.tree.leaves(params), jax.tree.leaves(mask), strict=True
            )
        ]
        return jax.tree.unflatten(structure, scaled), state

    return optax.GradientTransformation(lambda _params: optax.EmptyState(), update)


def scale_by_trust_ratio(mask: Any, sum_shards: Sum = _whole) -> optax.GradientTransformation:
    """Makes every layer's update as long as its parameters: LAMB, after Adam and the decay.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020.

    Args:
        mask: tree of bools; updates of parameters with False stay as they are.
        sum_shards: adds up squares where a device has a part of each parameter only.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        update_norms, param_norms = _norms(updates, params, sum_shards)
        both = (update_norms > 0) & (param_norms > 0)
        ratios = jnp.where(both & jnp.stack(jax.tree.leaves(mask)), param_norms / update_norms, 1.0)
        leaves, structure = jax.tree.flatten(updates)
        return jax.tree.unflatten(structure, [ratio * leaf for ratio, leaf in zip(ratios, leaves, strict=True)]), state

    return optax.GradientTransformation(lambda _params: optax.EmptyState(), update)


def make_optimizer(optim: OptimConfig, params_shape: Any, sum_shards: Sum = _whole) -> optax.GradientTransformation:
    """Returns the transformation whose updates are to be multiplied by minus the learning rate.

    Sources: Sutskever et al., "On the importance of initialization and momentum", 2013 (Nesterov, as optax and
    PyTorch write it); Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.

    Args:
        optim: the options.
        params_shape: of the parameters that are trained, whole: kernels, of rank 2 and more, are decayed; biases and
            BatchNorm's parameters only if asked for.
        sum_shards: adds up squares over devices, where a device updates a part of each parameter only.
    """
    mask = jax.tree.map(lambda leaf: optim.decay_norm_and_bias or leaf.ndim > 1, params_shape)
    decay = optax.add_decayed_weights(optim.weight_decay, mask) if optim.weight_decay else optax.identity()
    momentum = optax.trace(optim.momentum, optim.nesterov) if optim.momentum else optax.identity()
    clip = [clip_by_global_norm(optim.clip_norm, sum_shards)] if optim.clip_norm else []
    if optim.kind == "adamw":
        return optax.chain(*clip, optax.scale_by_adam(optim.momentum, optim.beta2), decay)
    if optim.kind == "lamb":
        adam = optax.scale_by_adam(optim.momentum, optim.beta2, eps=1e-6)  # the paper's
        return optax.chain(*clip, adam, decay, scale_by_trust_ratio(mask, sum_shards))
    if optim.kind == "lars":
        return optax.chain(*clip, scale_by_lars(optim.trust, optim.weight_decay, mask, sum_shards), momentum)
    return optax.chain(*clip, decay, momentum) if optim.decay == "l2" else optax.chain(*clip, momentum, decay)


def apply_optimizer(
    optimizer: optax.GradientTransformation, gradients: Any, opt_state: Any, params: Any, learning_rate: jax.Array
) -> tuple[Any, Any]:
    """Returns the new parameters, or parts of them, and the new state of an optimizer for a learning rate of one."""
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, jax.tree.map(lambda update: -learning_rate * update, updates)), opt_state


def make_learning_rates(optim: OptimConfig, epochs: int, steps_per_epoch: int, global_batch: int) -> np.ndarray:
    """Returns the learning rate of every step of the run, float32, shape (epochs * steps_per_epoch,).

    The warm-up reaches the peak at its last step; cosine, linear and quadratic reach 0 one step after the last.

    >>> make_learning_rates(OptimConfig(learning_rate=1.0, schedule="linear", warmup_epochs=1), 3, 2, 1)
    array([0.5 , 1.  , 1.  , 0.75, 0.5 , 0.25], dtype=float32)
    """
    times = global_batch / optim.scale_from_batch if optim.scale_from_batch else 1.0
    peak = optim.learning_rate * (times if optim.scale_rule == "linear" else times**0.5)
    num_steps = epochs * steps_per_epoch
    warmup = optim.warmup_steps or round(optim.warmup_epochs * steps_per_epoch)
    rest = max(num_steps - warmup, 1)
    if optim.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest)
    elif optim.schedule == "linear":
        after = optax.linear_schedule(peak, 0.0, rest)
    elif optim.schedule == "quadratic":
        after = optax.polynomial_schedule(peak, 0.0, 2, rest)
    elif optim.schedule == "step":
        drops: dict[int, float] = {}
        for epoch in optim.milestones:  # two may fall on the same step
            step = round(epoch * steps_per_epoch) - warmup
            drops[step] = drops.get(step, 1.0) * optim.step_factor
        after = optax.piecewise_constant_schedule(peak, drops)
    else:
        after = optax.constant_schedule(peak)

    @jax.jit
    def rate(step: jax.Array) -> jax.Array:
        later = jnp.broadcast_to(jnp.asarray(after(jnp.maximum(step - warmup, 0)), jnp.float32), step.shape)
        return jnp.where(step < warmup, peak * (step + 1) / warmup, later) if warmup else later

    return np.asarray(rate(np.arange(num_steps, dtype=np.int32)), np.float32)
