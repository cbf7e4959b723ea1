"""Every choice of a run, as frozen dataclasses, checked once.

No value is None, so that the written TOML says everything: `0`, `""` and `()` stand for "the default of
whatever it belongs to" where a docstring says so.
"""

import math
import unicodedata
from dataclasses import dataclass, field
from typing import Any, Literal

import pydantic

_FORBID = pydantic.ConfigDict(extra="forbid")
_INT_LIMIT = 2**31  # examples and steps are counted in int32 on the devices
_FLOAT_LIMIT = 3.4e38  # float32's, in which the devices compute
_LEAST, _MOST = 1e-30, 1e30  # of a rate: float32 does not round it to 0, nor its product with a step to infinity
_BELOW_ONE = 1 - 2**-25  # from here on float32 rounds to 1
_NOT_TEXT = ("Cc", "Cs", "Zl", "Zp")  # control characters, halves of surrogate pairs, ends of lines and paragraphs


def _require(holds: bool, what: str, rule: str) -> None:
    if not holds:
        raise ValueError(f"{what}: {rule}")


def _check_values(options: Any, prefix: str = "") -> None:
    """Raises ValueError for what no option can be, whatever it means: a path with NUL, nan, a number beyond int32."""
    for name, value in vars(options).items():
        for item in value if isinstance(value, tuple) else (value,):
            what = f"{prefix}{name}={item!r}"
            if isinstance(item, str):
                is_text = not any(unicodedata.category(character) in _NOT_TEXT for character in item)
                _require(is_text, what, "must be one line of text, without control characters")
            elif isinstance(item, float):
                _require(abs(item) <= _FLOAT_LIMIT, what, f"must be a number, of at most {_FLOAT_LIMIT:g}")
            elif isinstance(item, int) and name != "seed":
                _require(-_INT_LIMIT < item < _INT_LIMIT, what, "must be below 2^31")


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
        _check_values(self, "data.")
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
        shape = self.image_shape
        _require(
            not shape or (len(shape) == 3 and min(shape) > 0 and math.prod(shape) < _INT_LIMIT),
            f"data.image_shape={shape}",
            "must be height, width, channels, all positive, less than 2^31 bytes in all",
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
        _check_values(self, "model.")
        _require(0 <= self.width <= 2**16, f"model.width={self.width}", "must be from 1 to 65536, or 0 for the paper's")


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, weight decay and a learning-rate schedule."""

    __pydantic_config__ = _FORBID

    kind: Literal["sgd", "adamw", "lars"] = "sgd"
    """Lars: SGD with a rate for each layer, for large batches; adamw decays as with decay=decoupled."""
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
    """Share of the old velocity in the new one; of adamw, the first beta."""
    beta2: float = 0.999
    """Adamw only: share of the old squares in the new ones."""
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

    def __post_init__(self) -> None:
        _check_values(self, "optim.")
        for option in ("learning_rate", "trust", "clip_norm"):
            value, rule = getattr(self, option), f"must be positive, from {_LEAST:g} to {_MOST:g}"
            off = option == "clip_norm" and value == 0
            _require(off or _LEAST <= value <= _MOST, f"optim.{option}={value}", rule)
        _require(0 < self.step_factor < 1, f"optim.step_factor={self.step_factor}", "must be in (0, 1)")
        rounded = "also when rounded to float32"
        _require(0 <= self.momentum < _BELOW_ONE, f"optim.momentum={self.momentum}", f"must be in [0, 1), {rounded}")
        _require(0 < self.beta2 < _BELOW_ONE, f"optim.beta2={self.beta2}", f"must be in (0, 1), {rounded}")
        _require(
            self.momentum > 0 or not self.nesterov,
            "optim.nesterov with optim.momentum=0",
            "Nesterov needs momentum; pass --optim.no-nesterov",
        )
        for option in ("scale_from_batch", "weight_decay", "warmup_epochs"):
            _require(getattr(self, option) >= 0, f"optim.{option}={getattr(self, option)}", "must not be negative")
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


def _check_schedule(optim: OptimConfig, epochs: int, global_batch: int) -> None:
    """Raises ValueError where the optimizer's options do not fit those of the run."""
    rate, scale = optim.learning_rate, optim.scale_from_batch
    _require(
        not scale or _LEAST <= rate * global_batch / scale <= _MOST,
        f"optim.learning_rate={rate} with global_batch={global_batch} and optim.scale_from_batch={scale}",
        f"the scaled rate must be from {_LEAST:g} to {_MOST:g}",
    )
    _require(
        optim.warmup_epochs <= epochs,
        f"optim.warmup_epochs={optim.warmup_epochs} with epochs={epochs}",
        "the warm-up must end within the run; pass --optim.warmup-epochs",
    )
    _require(
        all(optim.warmup_epochs <= epoch < epochs for epoch in optim.milestones),
        f"optim.milestones={optim.milestones} with epochs={epochs}",
        "each must lie between the end of the warm-up and the end of the run; pass --optim.milestones",
    )


Reducing = Literal["two_group", "auto", "single", "per_leaf", "ddp", "ddp_initial", "ring", "hierarchical", "zero1"]
"""Ways of summing gradients, `reducers.py`."""


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
    bn: Literal["local", "sync", "rank0"] = "local"
    """BatchNorm over each device's batch, or over the global batch; running statistics: the mean over the devices,
    with rank0 those of the first device, as DistributedDataParallel keeps them."""
    reducer: Reducing = "two_group"
    """How gradients are summed. Auto: in groups that the link is predicted to need; ddp: in PyTorch's buckets, as
    rebuilt after its first step (ddp_initial: as first assigned); ring, hierarchical: written out; zero1: to shards,
    whose owner updates them."""
    bucket_mb: float = 25.0
    """MiB of a bucket of ddp; the first one filled holds at most 1, whatever this is."""
    comm_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which gradients are summed; they are divided by the global batch before, so that sums fit."""
    accumulate: int = 1
    """Micro-batches of a step, one after the other: the memory of one, one sum over the devices for all."""
    freeze: tuple[str, ...] = ()
    """Parameters that stay as they are: kinds of region (G_FIRST_CONV) or patterns of names (stage1*/conv*)."""
    last_batch: Literal["pad", "drop"] = "pad"
    """What becomes of a last batch with fewer examples: padding that counts for nothing, or it is left out."""
    hosts: int = 0
    """Hosts that the devices are said to lie on, for hierarchical; 0: as many as there are."""
    nccl: tuple[str, ...] = ()
    """NAME=VALUE pairs for NCCL's environment (NCCL_ALGO=Ring), set before it starts and kept with the run."""
    link_gbytes: float = 0.0
    """GB/s that the slowest link between the GPUs reaches, for auto and for predictions; 0: the data sheet's."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type to compute in; parameters, statistics and reductions stay float32."""
    deterministic: bool = False
    """On GPUs: only kernels and AllReduces that give the same bits in every run, at some cost; the CPU always does."""
    save_every: int = 0
    """Steps between two checkpoints; 0: at the end of every epoch, where there is always one."""
    max_bad_steps: int = 10
    """Steps in a row whose gradients are not finite, and which change nothing, before the run gives up; 0: never."""
    watchdog_seconds: float = 1800.0
    """The process ends, with the stack of every thread, when no step has finished for so long; 0: never."""
    log_every: int = 50
    """Steps between two training lines in the records; the end of an epoch always writes one."""
    workdir: str = ""
    """Folder of the run, resumed when it exists; empty: a new one under runs/."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        _check_values(self)
        _require(self.global_batch > 0, f"global_batch={self.global_batch}", "must be positive")
        _require(self.epochs > 0, f"epochs={self.epochs}", "must be positive")
        _require(0 <= self.seed < 2**32, f"seed={self.seed}", "must be in [0, 2^32)")
        _require(
            self.link_gbytes == 0 or 1e-6 <= self.link_gbytes <= 1e6,
            f"link_gbytes={self.link_gbytes}",
            "must be positive, from 1e-06 to 1e+06, or 0 to look it up",
        )
        _require(self.bucket_mb >= 0, f"bucket_mb={self.bucket_mb}", "must not be negative")
        _require(self.accumulate > 0, f"accumulate={self.accumulate}", "must be positive")
        _require(self.hosts >= 0, f"hosts={self.hosts}", "must be positive, or 0 for as many as there are")
        for pair in self.nccl:
            name, _, value = pair.partition("=")
            _require(
                name.startswith("NCCL_") and name != "NCCL_" and bool(value),
                f"nccl={pair!r}",
                "write NCCL_NAME=VALUE, NCCL_ALGO=Ring for instance",
            )
        for option in ("save_every", "max_bad_steps"):
            _require(getattr(self, option) >= 0, f"{option}={getattr(self, option)}", "must not be negative")
        _require(
            0 <= self.watchdog_seconds <= 1e9,
            f"watchdog_seconds={self.watchdog_seconds}",
            "must be positive, at most 1e+09, or 0 for none",
        )
        _require(self.log_every > 0, f"log_every={self.log_every}", "must be positive")
        _check_schedule(self.optim, self.epochs, self.global_batch)
