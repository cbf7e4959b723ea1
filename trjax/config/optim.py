"""Options of the optimizer."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from trjax.config.checks import Checked
from trjax.config.fields import INCREASING, NonNegativeFloat32, NonNegativeInt32, rule, zero_or

LEAST_RATE, MOST_RATE = 1e-30, 1e30
"""Limits of a rate: float32 does not round it to 0, nor its product with a step to infinity."""

_BELOW_ONE = rule(lambda value: value < 1 - 2**-25, "must be below 1, also when rounded to float32")
_Share = Annotated[float, Field(ge=0, lt=1), _BELOW_ONE]
_Rate = Annotated[float, Field(ge=LEAST_RATE, le=MOST_RATE)]


@dataclass(frozen=True)
class OptimConfig(Checked):
    """The optimizer, weight decay and a learning-rate schedule."""

    section = "optim."

    kind: Literal["sgd", "adamw", "lars", "lamb"] = "sgd"
    """Lars, lamb: SGD, AdamW with a rate for each layer, for large batches; adamw and lamb decay as decoupled."""
    learning_rate: _Rate = 0.1
    """Peak learning rate, before `scale_from_batch`."""
    scale_from_batch: NonNegativeInt32 = 0
    """Multiply the rate by global_batch / this, or as `scale_rule` has it; 0 means off."""
    scale_rule: Literal["linear", "sqrt"] = "linear"
    """How the rate grows with the batch: linear for SGD, sqrt (of the ratio) for the likes of Adam."""
    schedule: Literal["cosine", "step", "linear", "quadratic", "constant"] = "cosine"
    """Shape after the warm-up; cosine, linear and quadratic end at 0."""
    warmup_epochs: NonNegativeFloat32 = 0.0
    """Linear warm-up from near 0."""
    warmup_steps: NonNegativeInt32 = 0
    """Linear warm-up from near 0, counted in steps; 0 means that warmup_epochs counts."""
    milestones: Annotated[tuple[NonNegativeFloat32, ...], INCREASING] = ()
    """Schedule step only: epochs at which the rate is multiplied by `step_factor`."""
    step_factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Schedule step only: what each milestone multiplies the rate by."""
    momentum: _Share = 0.9
    """Share of the old velocity in the new one; of adamw and lamb, the first beta."""
    beta2: Annotated[float, Field(gt=0, lt=1), _BELOW_ONE] = 0.999
    """Adamw and lamb only: share of the old squares in the new ones."""
    trust: _Rate = 0.001
    """Lars only: a layer's step is this share of its parameters' length, at a rate of one."""
    clip_norm: Annotated[float, zero_or(LEAST_RATE, MOST_RATE, "to disable clipping")] = 0.0
    """Longest gradient, all parameters taken as one vector; longer ones are shortened to it; 0 means off."""
    nesterov: bool = True
    """Look ahead by one velocity (Nesterov); sgd and lars only."""
    weight_decay: NonNegativeFloat32 = 1e-4
    """Strength of the decay; 0 means off."""
    decay: Literal["l2", "decoupled"] = "l2"
    """L2 adds to the gradient, before the momentum; decoupled shrinks the parameter, after it."""
    decay_norm_and_bias: bool = False
    """Decay BatchNorm's parameters and the biases too."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each target that is spread over all classes."""
    ema_decay: _Share = 0.0
    """Keep a mean of parameters and statistics, and evaluate it too: share of the old mean in the new one; 0 is off."""

    def check_rules(self) -> None:
        """Raises ValueError if options do not fit each other."""
        self._check_nesterov()
        self._check_one_warmup()
        self._check_milestones()

    def _check_nesterov(self) -> None:
        if self.nesterov and self.momentum == 0:
            raise self.conflict("nesterov", "momentum", why="Nesterov needs momentum; pass --optim.no-nesterov")

    def _check_one_warmup(self) -> None:
        if self.warmup_steps and self.warmup_epochs:
            raise self.conflict("warmup_steps", "warmup_epochs", why="only one may be set; set the other to 0")

    def _check_milestones(self) -> None:
        if (self.schedule == "step") != bool(self.milestones):
            why = "milestones belong to schedule=step, which needs them"
            raise self.conflict("schedule", "milestones", why=why)
