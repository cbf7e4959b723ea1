"""Every choice of a run, as frozen dataclasses: checked once, written to TOML and read back.

No value is None, so that the written TOML says everything: `0`, `""` and `()` stand for "the default of
whatever it belongs to" where a docstring says so.
"""

import json
import math
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pydantic
import tomli_w

_FORBID = pydantic.ConfigDict(extra="forbid")


def _require(holds: bool, what: str, rule: str) -> None:
    if not holds:
        raise ValueError(f"{what}: {rule}")


@dataclass(frozen=True)
class DataConfig:
    """Where examples come from and how they are varied."""

    __pydantic_config__ = _FORBID

    source: Literal["digits", "cifar10", "cifar100", "imagenet", "synthetic"] = "digits"
    """Digits ships with scikit-learn; synthetic is noise that depends on the class."""
    root: str = ""
    """Folder that holds the archives or extracted files (CIFAR)."""
    image_shape: tuple[int, ...] = ()
    """Height, width, channels; imagenet and synthetic only, where empty means 224 224 3 and 32 32 3."""
    num_classes: int = 0
    """Synthetic only; 0 means 10."""
    train_examples: int = 0
    """Synthetic only; 0 means 2048."""
    test_examples: int = 0
    """Synthetic only; 0 means 512."""
    crop_padding: int = 0
    """Random crop after padding every side with this many zero pixels."""
    flip: bool = False
    """Mirror half of the training images, left to right."""

    def __post_init__(self) -> None:
        synthetic_only = (self.num_classes, self.train_examples, self.test_examples)
        _require(
            self.source == "synthetic" or not any(synthetic_only),
            f"data.source={self.source} with data.num_classes, data.train_examples or data.test_examples",
            "these belong to data.source=synthetic",
        )
        for option in ("num_classes", "train_examples", "test_examples", "crop_padding"):
            _require(getattr(self, option) >= 0, f"data.{option}={getattr(self, option)}", "must not be negative")
        _require(
            self.source in ("synthetic", "imagenet") or not self.image_shape,
            f"data.source={self.source} with data.image_shape={self.image_shape}",
            "its images have one shape; leave data.image_shape out",
        )
        _require(
            not self.image_shape or (len(self.image_shape) == 3 and min(self.image_shape) > 0),
            f"data.image_shape={self.image_shape}",
            "must be height, width, channels, all positive",
        )


@dataclass(frozen=True)
class ModelConfig:
    """Which ResNet."""

    __pydantic_config__ = _FORBID

    arch: Literal[
        "resnet8",
        "resnet14",
        "resnet20",
        "resnet32",
        "resnet44",
        "resnet56",
        "resnet110",
        "resnet18",
        "resnet34",
        "resnet50",
        "resnet101",
        "resnet152",
    ] = "resnet8"
    """8 to 110 (6n+2): He et al.'s CIFAR family; 18 to 152: the ImageNet family, v1.5."""
    stem: Literal["default", "imagenet", "cifar"] = "default"
    """Imagenet: 7x7 stride 2 and max-pool; cifar: 3x3 stride 1; default: the family's."""
    width: int = 0
    """Channels of the first stage; 0 means the paper's, 16 or 64."""

    def __post_init__(self) -> None:
        _require(self.width >= 0, f"model.width={self.width}", "must not be negative")


@dataclass(frozen=True)
class OptimConfig:
    """SGD with momentum, weight decay and a learning-rate schedule."""

    __pydantic_config__ = _FORBID

    learning_rate: float = 0.1
    """Peak learning rate, before `scale_from_batch`."""
    scale_from_batch: int = 0
    """Linear scaling rule: multiply the rate by global_batch / this; 0 means off."""
    schedule: Literal["cosine", "step", "linear", "constant"] = "cosine"
    """Shape after the warm-up; cosine and linear end at 0."""
    warmup_epochs: float = 0.0
    """Linear warm-up from near 0."""
    milestones: tuple[float, ...] = ()
    """Schedule step only: epochs at which the rate is multiplied by `step_factor`."""
    step_factor: float = 0.1
    """Schedule step only: what each milestone multiplies the rate by."""
    momentum: float = 0.9
    """Share of the old velocity in the new one."""
    nesterov: bool = True
    """Look ahead by one velocity (Nesterov)."""
    weight_decay: float = 1e-4
    """Strength of the decay; 0 means off."""
    decay: Literal["l2", "decoupled"] = "l2"
    """L2 adds to the gradient, before the momentum; decoupled shrinks the parameter, after it."""
    decay_norm_and_bias: bool = False
    """Decay BatchNorm's parameters and the biases too."""

    def __post_init__(self) -> None:
        _require(0 < self.learning_rate < math.inf, f"optim.learning_rate={self.learning_rate}", "must be positive")
        _require(0 < self.step_factor < 1, f"optim.step_factor={self.step_factor}", "must be in (0, 1)")
        _require(
            self.scale_from_batch >= 0,
            f"optim.scale_from_batch={self.scale_from_batch}",
            "must not be negative",
        )
        _require(0 <= self.momentum < 1, f"optim.momentum={self.momentum}", "must be in [0, 1)")
        _require(
            self.momentum > 0 or not self.nesterov,
            "optim.nesterov with optim.momentum=0",
            "Nesterov needs momentum; pass --optim.no-nesterov",
        )
        _require(self.weight_decay >= 0, f"optim.weight_decay={self.weight_decay}", "must not be negative")
        _require(self.warmup_epochs >= 0, f"optim.warmup_epochs={self.warmup_epochs}", "must not be negative")
        _require(
            (self.schedule == "step") == bool(self.milestones),
            f"optim.schedule={self.schedule} with optim.milestones={self.milestones}",
            "milestones belong to schedule=step, which needs them",
        )
        _require(
            list(self.milestones) == sorted(set(self.milestones)) and min(self.milestones, default=0) >= 0,
            f"optim.milestones={self.milestones}",
            "must increase and not be negative",
        )


@dataclass(frozen=True)
class Config:
    """A whole run."""

    __pydantic_config__ = _FORBID

    preset: str = "custom"
    """Recipe to start from: one of the list above."""
    devices: str = "all"
    """Devices of this machine: `all`, `0-3` or `0,2,5`; on the CPU, that many are made."""
    platform: Literal["auto", "cpu", "cuda"] = "auto"
    """Auto: cuda where an NVIDIA driver is present, else cpu."""
    global_batch: int = 96
    """Examples per step over all devices; must be divisible by their number."""
    epochs: int = 30
    """Times that every training example is seen."""
    seed: int = 0
    """Fixes initial parameters, data order and augmentation."""
    bn: Literal["local", "sync"] = "local"
    """BatchNorm over each device's batch, or over the global batch."""
    reducer: Literal["two_group", "auto"] = "two_group"
    """How gradients are summed: in two groups, or (auto) in others where the link is predicted to need them."""
    link_gbytes: float = 0.0
    """GB/s that the slowest link between the GPUs reaches, for `auto` and for predictions; 0: the data sheet's."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type to compute in; parameters, statistics and reductions stay float32."""
    log_every: int = 50
    """Steps between two training lines in the records; the end of an epoch always writes one."""
    workdir: str = ""
    """Folder of the run, resumed when it exists; empty: a new one under runs/."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        _require(self.global_batch > 0, f"global_batch={self.global_batch}", "must be positive")
        _require(self.epochs > 0, f"epochs={self.epochs}", "must be positive")
        _require(0 <= self.seed < 2**32, f"seed={self.seed}", "must be in [0, 2^32)")
        _require(
            0 <= self.link_gbytes < math.inf, f"link_gbytes={self.link_gbytes}", "must be positive, or 0 to look it up"
        )
        _require(self.log_every > 0, f"log_every={self.log_every}", "must be positive")
        _require(
            self.optim.warmup_epochs <= self.epochs,
            f"optim.warmup_epochs={self.optim.warmup_epochs} with epochs={self.epochs}",
            "the warm-up must end within the run; pass --optim.warmup-epochs",
        )
        _require(
            all(self.optim.warmup_epochs <= epoch < self.epochs for epoch in self.optim.milestones),
            f"optim.milestones={self.optim.milestones} with epochs={self.epochs}",
            "each must lie between the end of the warm-up and the end of the run; pass --optim.milestones",
        )


def _overlay(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        inner = base.get(key)
        merged[key] = _overlay(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def config_from_table(table: dict[str, Any], base: Config, where: str) -> Config:
    """Returns `base` with the values of a table of plain types laid over it.

    Raises:
        ValueError: names every option of `where` that is unknown, has the wrong type or an impossible value.
    """
    try:
        text = json.dumps(_overlay(asdict(base), table), default=str)
        return pydantic.TypeAdapter(Config).validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        problems = []
        for detail in error.errors(include_url=False):
            option = ".".join(str(part) for part in detail["loc"])
            unknown = detail["type"] in ("unexpected_keyword_argument", "extra_forbidden")
            message = "unknown option" if unknown else detail["msg"].removeprefix("Value error, ")
            given = "" if unknown or isinstance(detail["input"], dict) else f", not {detail['input']!r}"
            problems.append(f"{option}: {message}{given}" if option else message)
        raise ValueError(f"{where}: " + "; ".join(problems)) from None


def read_table(path: str | Path) -> dict[str, Any]:
    """Returns the table in a TOML file.

    Raises:
        ValueError: the file cannot be read or is not TOML; names the file.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"cannot read the configuration {path}: {error}") from error


def config_to_toml(config: Config) -> str:
    """Returns TOML text that reproduces the configuration.

    >>> import tomllib
    >>> config_from_table(tomllib.loads(config_to_toml(Config(epochs=3))), Config(), "x").epochs
    3
    """
    return tomli_w.dumps(asdict(config))
