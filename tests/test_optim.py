from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import attempt
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trjax.config.run import Config, OptimConfig
from trjax.step.optim import make_learning_rates, make_optimizer

pytestmark = pytest.mark.fast


def walk(optim: OptimConfig, gradients: list[float], rate: float = 0.1) -> list[float]:
    """One kernel that starts at 1, after each update."""
    params: Any = {"kernel": jnp.ones((1, 1))}
    optimizer = make_optimizer(optim, params)
    state, path = optimizer.init(params), []
    for gradient in gradients:
        updates, state = optimizer.update({"kernel": jnp.full((1, 1), gradient)}, state, params)
        params = jax.tree.map(lambda leaf, update: leaf - rate * update, params, updates)
        path.append(float(params["kernel"][0, 0]))
    return path


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # g = 1, 1: velocity 1, 1.9
        ({"nesterov": False, "weight_decay": 0.0}, [1 - 0.1, 1 - 0.1 - 0.19]),
        # Nesterov adds the gradient to 0.9 x velocity: 1.9, 2.71
        ({"nesterov": True, "weight_decay": 0.0}, [1 - 0.19, 1 - 0.19 - 0.271]),
        # L2: g = 1 + 0.5 x 1 = 1.5, p = 0.85; then g = 1 + 0.5 x 0.85 = 1.425, v = 0.9 x 1.5 + 1.425 = 2.775
        ({"nesterov": False, "weight_decay": 0.5, "decay": "l2"}, [0.85, 0.85 - 0.2775]),
        # decoupled: u = 1 + 0.5 x 1; then v = 1.9, u = 1.9 + 0.5 x 0.85
        ({"nesterov": False, "weight_decay": 0.5, "decay": "decoupled"}, [0.85, 0.85 - 0.2325]),
        ({"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}, [0.9, 0.8]),
    ],
)
def test_updates_worked_by_hand(options: Any, expected: list[float]) -> None:
    np.testing.assert_allclose(walk(OptimConfig(**options), [1.0, 1.0]), expected, rtol=1e-6)


@pytest.mark.parametrize(("everything", "expected"), [(False, [0.5, 0, 0]), (True, [0.5, 0.5, 0.5])])
def test_norms_and_biases_decay_only_if_asked(everything: bool, expected: list[float]) -> None:
    params = {"kernel": jnp.ones((3, 3, 1, 1)), "norm": {"scale": jnp.ones(2), "bias": jnp.ones(2)}}
    optim = OptimConfig(weight_decay=0.5, momentum=0.0, nesterov=False, decay_norm_and_bias=everything)
    optimizer = make_optimizer(optim, params)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert [float(updates["kernel"][0, 0, 0, 0]), *(float(leaf[0]) for leaf in updates["norm"].values())] == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "constant"}, [0.4] * 8),
        ({"schedule": "quadratic", "warmup_epochs": 2.0}, [0.1, 0.2, 0.3, 0.4, 0.4, 0.225, 0.1, 0.025]),
        ({"schedule": "linear"}, [0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05]),
        ({"schedule": "cosine"}, [0.2 * (1 + np.cos(np.pi * step / 8)) for step in range(8)]),
        ({"schedule": "step", "milestones": (1.0, 3.0)}, [0.4, 0.4, 0.04, 0.04, 0.04, 0.04, 0.004, 0.004]),
        (
            {"schedule": "cosine", "warmup_epochs": 2.0},
            [0.1, 0.2, 0.3, 0.4, 0.4, *(0.2 * (1 + np.cos(np.pi * step / 4)) for step in (1, 2, 3))],
        ),
        ({"schedule": "step", "milestones": (3.0,), "warmup_epochs": 1.0}, [0.2, 0.4, 0.4, 0.4, 0.4, 0.4, 0.04, 0.04]),
        ({"schedule": "constant", "scale_from_batch": 256}, [0.8] * 8),
        ({"schedule": "constant", "scale_from_batch": 128, "scale_rule": "sqrt"}, [0.8] * 8),
        ({"schedule": "linear", "warmup_steps": 4}, [0.1, 0.2, 0.3, 0.4, 0.4, 0.3, 0.2, 0.1]),
        ({"schedule": "step", "milestones": (1.0, 1.1)}, [0.4, 0.4, 0.004, 0.004, 0.004, 0.004, 0.004, 0.004]),
    ],
)
def test_schedules_worked_by_hand(options: Any, expected: list[float]) -> None:
    rates = make_learning_rates(
        OptimConfig(learning_rate=0.4, **options), epochs=4, steps_per_epoch=2, global_batch=512
    )
    np.testing.assert_allclose(rates, expected, rtol=1e-5, atol=1e-8)
    assert rates.dtype == np.float32


@settings(max_examples=30)
@given(
    st.floats(1e-32, 1e32),
    st.integers(1, 2**31 - 1),
    st.integers(0, 2**31 - 1),
    st.sampled_from(["cosine", "linear", "quadratic", "constant"]),
    st.sampled_from([0.0, 1e-30, 0.3, 10.0]),
)
@example(1e30, 2**31 - 1, 1, "constant", 10.0)
@example(1e30, 1, 0, "constant", 10.0)
def test_rates_that_are_accepted_are_numbers(
    rate: float, global_batch: int, scale: int, schedule: Any, warmup: float
) -> None:
    options = {"learning_rate": rate, "scale_from_batch": scale, "schedule": schedule, "warmup_epochs": warmup}
    config, problem = attempt(lambda: Config(epochs=10, global_batch=global_batch, optim=OptimConfig(**options)))
    if config is None:
        assert "optim.learning_rate=" in problem
    else:
        rates = make_learning_rates(config.optim, config.epochs, 10, config.global_batch)
        assert np.isfinite(rates).all()
        assert rates.min() >= 0
        assert rates.max() > 0


@pytest.mark.parametrize("everything", [True, False])
def test_lamb_is_the_one_of_optax_where_it_applies(everything: bool) -> None:
    random = np.random.default_rng(0)
    draw = lambda: {  # noqa: E731
        "kernel": jnp.asarray(random.normal(size=(3, 4)), jnp.float32),
        "bias": jnp.asarray(random.normal(size=4), jnp.float32),
    }
    params, gradients = draw(), [draw() for _ in range(3)]
    options: Any = {"momentum": 0.8, "beta2": 0.9, "weight_decay": 0.1, "decay_norm_and_bias": everything}
    ours = make_optimizer(OptimConfig(kind="lamb", **options), params)
    theirs = optax.lamb(1.0, 0.8, 0.9, weight_decay=0.1, mask=None if everything else {"kernel": True, "bias": False})
    adam = optax.scale_by_adam(0.8, 0.9, eps=1e-6)
    states = [optimizer.init(params) for optimizer in (ours, theirs, adam)]
    for gradient in gradients:
        found, states[0] = ours.update(gradient, states[0], params)
        expected, states[1] = theirs.update(gradient, states[1], params)
        plain, states[2] = adam.update(gradient, states[2], params)
        np.testing.assert_allclose(found["kernel"], -expected["kernel"], rtol=1e-5)
        np.testing.assert_allclose(found["bias"], -expected["bias"] if everything else plain["bias"], rtol=1e-5)
