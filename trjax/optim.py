"""Optimizers for a learning rate of one, and the learning rate of every step.

The rate is an input of the compiled step, never a constant in it: another rate needs no other program.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trjax.config import OptimConfig


def _decayed(params: Any) -> Any:
    """Marks the parameters of rank 2 and more: kernels, not biases nor BatchNorm's parameters."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def make_optimizer(optim: OptimConfig) -> optax.GradientTransformation:
    """Returns SGD whose updates are to be multiplied by minus the learning rate.

    Sources: Sutskever et al., "On the importance of initialization and momentum", 2013 (Nesterov, as optax and
    PyTorch write it); Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """
    mask = None if optim.decay_norm_and_bias else _decayed
    decay = optax.add_decayed_weights(optim.weight_decay, mask) if optim.weight_decay else optax.identity()
    momentum = optax.trace(optim.momentum, optim.nesterov) if optim.momentum else optax.identity()
    return optax.chain(decay, momentum) if optim.decay == "l2" else optax.chain(momentum, decay)


def make_learning_rates(optim: OptimConfig, epochs: int, steps_per_epoch: int, global_batch: int) -> np.ndarray:
    """Returns the learning rate of every step of the run, float32, shape (epochs * steps_per_epoch,).

    The warm-up reaches the peak at its last step; cosine and linear reach 0 one step after the last.

    >>> make_learning_rates(OptimConfig(learning_rate=1.0, schedule="linear", warmup_epochs=1), 3, 2, 1)
    array([0.5 , 1.  , 1.  , 0.75, 0.5 , 0.25], dtype=float32)
    """
    peak = optim.learning_rate * (global_batch / optim.scale_from_batch if optim.scale_from_batch else 1.0)
    num_steps, warmup = epochs * steps_per_epoch, round(optim.warmup_epochs * steps_per_epoch)
    rest = max(num_steps - warmup, 1)
    if optim.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest)
    elif optim.schedule == "linear":
        after = optax.linear_schedule(peak, 0.0, rest)
    elif optim.schedule == "step":
        drops: dict[int, float] = {}
        for epoch in optim.milestones:  # two may fall on the same step
            step = round(epoch * steps_per_epoch) - warmup
            drops[step] = drops.get(step, 1.0) * optim.step_factor
        after = optax.piecewise_constant_schedule(peak, drops)
    else:
        after = optax.constant_schedule(peak)
    steps = jnp.arange(num_steps)
    rates = jnp.broadcast_to(jnp.asarray(after(jnp.maximum(steps - warmup, 0)), jnp.float32), steps.shape)
    if warmup:
        rates = jnp.where(steps < warmup, peak * (steps + 1) / warmup, rates)
    return np.asarray(rates, np.float32)
