"""Options of the optimizer."""

from dataclasses import dataclass
from typing import Literal

from trjax.config.checks import FORBID, LEAST_RATE, MOST_RATE, check_values, require

_BELOW_ONE = 1 - 2**-25  # from here on float32 rounds to 1


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, weight decay and a learning-rate schedule."""

    __pydantic_config__ = FORBID

    kind: Literal["sgd", "adamw", "lars", "lamb"] = "sgd"
    """Lars, lamb: SGD, AdamW with a rate for each layer, for large batches; adamw and lamb decay as decoupled."""
    learning_rate: float = 0.1
    """Peak learning rate, before `scale_from_batch`."""
    scale_from_batch: int = 0
    """Multiply the rate by global_batch / this, or as `scale_rule` has it; 0 means off."""
    scale_rule: Literal["linear", "sqrt"] = "linear"
    """How the rate grows with the batch: linear for SGD, sqrt (of the ratio) for the likes of Adam."""
    schedule: Literal["cosine", "step", "linear", "quadratic", "constant"] = "cosine"
    """Shape after the warm-up; cosine, linear and quadratic end at 0."""
    warmup_epochs: float = 0.0
    """Linear warm-up from near 0."""
    warmup_steps: int = 0
    """The same in steps, in place of epochs."""
    milestones: tuple[float, ...] = ()
    """Schedule step only: epochs at which the rate is multiplied by `step_factor`."""
    step_factor: float = 0.1
    """Schedule step only: what each milestone multiplies the rate by."""
    momentum: float = 0.9
    """Share of the old velocity in the new one; of adamw and lamb, the first beta."""
    beta2: float = 0.999
    """Adamw and lamb only: share of the old squares in the new ones."""
    trust: float = 0.001
    """Lars only: a layer's step is this share of its parameters' length, at a rate of one."""
    clip_norm: float = 0.0
    """Longest gradient, all parameters taken as one vector; longer ones are shortened to it; 0 means off."""
    nesterov: bool = True
    """Look ahead by one velocity (Nesterov); sgd and lars only."""
    weight_decay: float = 1e-4
    """Strength of the decay; 0 means off."""
    decay: Literal["l2", "decoupled"] = "l2"
    """L2 adds to the gradient, before the momentum; decoupled shrinks the parameter, after it."""
    decay_norm_and_bias: bool = False
    """Decay BatchNorm's parameters and the biases too."""
    label_smoothing: float = 0.0
    """Share of each target that is spread over all classes."""
    ema_decay: float = 0.0
    """Keep a mean of parameters and statistics, and evaluate it too: share of the old mean in the new one; 0 is off."""

    def __post_init__(self) -> None:
        check_values(self, "optim.")
        for option in ("learning_rate", "trust", "clip_norm"):
            value, rule = getattr(self, option), f"must be positive, from {LEAST_RATE:g} to {MOST_RATE:g}"
            off = option == "clip_norm" and value == 0
            require(off or LEAST_RATE <= value <= MOST_RATE, f"optim.{option}={value}", rule)
        require(0 < self.step_factor < 1, f"optim.step_factor={self.step_factor}", "must be in (0, 1)")
        rounded = "also when rounded to float32"
        require(0 <= self.momentum < _BELOW_ONE, f"optim.momentum={self.momentum}", f"must be in [0, 1), {rounded}")
        require(0 < self.beta2 < _BELOW_ONE, f"optim.beta2={self.beta2}", f"must be in (0, 1), {rounded}")
        require(
            self.momentum > 0 or not self.nesterov,
            "optim.nesterov with optim.momentum=0",
            "Nesterov needs momentum; pass --optim.no-nesterov",
        )
        require(0 <= self.label_smoothing < 1, f"optim.label_smoothing={self.label_smoothing}", "must be in [0, 1)")
        require(0 <= self.ema_decay < _BELOW_ONE, f"optim.ema_decay={self.ema_decay}", f"must be in [0, 1), {rounded}")
        require(
            not (self.warmup_steps and self.warmup_epochs),
            f"optim.warmup_steps={self.warmup_steps} with optim.warmup_epochs={self.warmup_epochs}",
            "one warm-up is enough; leave one of them out",
        )
        for option in ("scale_from_batch", "weight_decay", "warmup_epochs", "warmup_steps"):
            require(getattr(self, option) >= 0, f"optim.{option}={getattr(self, option)}", "must not be negative")
        require(
            (self.schedule == "step") == bool(self.milestones),
            f"optim.schedule={self.schedule} with optim.milestones={self.milestones}",
            "milestones belong to schedule=step, which needs them",
        )
        require(
            list(self.milestones) == sorted(set(self.milestones)) and min(self.milestones, default=0) >= 0,
            f"optim.milestones={self.milestones}",
            "must increase and not be negative",
        )
