"""The parts of a run's configuration: data, model, optimizer, each checked by itself.

No value is None, so that the written TOML says everything: `0`, `""` and `()` stand for "the default of
whatever it belongs to" where a docstring says so.
"""

import math
import unicodedata
from dataclasses import dataclass
from typing import Any, Literal

import pydantic

FORBID = pydantic.ConfigDict(extra="forbid")
"""What is no option is an error."""
Platform = Literal["auto", "cpu", "cuda"]
_INT_LIMIT = 2**31  # examples and steps are counted in int32 on the devices
_FLOAT_LIMIT = 3.4e38  # float32's, in which the devices compute
LEAST_RATE, MOST_RATE = 1e-30, 1e30
"""Of a rate: float32 does not round it to 0, nor its product with a step to infinity."""
_BELOW_ONE = 1 - 2**-25  # from here on float32 rounds to 1
FROM_FILES = ("imagenet", "images", "npz")
"""Sources whose classes and sizes are those of the files below their root."""
_NOT_TEXT = ("Cc", "Cs", "Zl", "Zp")  # control characters, halves of surrogate pairs, ends of lines and paragraphs


def require(holds: bool, what: str, rule: str) -> None:
    """Raises ValueError, naming the option and the rule, if that does not hold."""
    if not holds:
        raise ValueError(f"{what}: {rule}")


def check_values(options: Any, prefix: str = "") -> None:
    """Raises ValueError for what no option can be, whatever it means: a path with NUL, nan, a number beyond int32."""
    for name, value in vars(options).items():
        for item in value if isinstance(value, tuple) else (value,):
            what = f"{prefix}{name}={item!r}"
            if isinstance(item, str):
                is_text = not any(unicodedata.category(character) in _NOT_TEXT for character in item)
                require(is_text, what, "must be one line of text, without control characters")
            elif isinstance(item, float):
                require(abs(item) <= _FLOAT_LIMIT, what, f"must be a number, of at most {_FLOAT_LIMIT:g}")
            elif isinstance(item, int) and name != "seed":
                require(-_INT_LIMIT < item < _INT_LIMIT, what, "must be below 2^31")


@dataclass(frozen=True)
class DataConfig:
    """Where examples come from and how they are varied."""

    __pydantic_config__ = FORBID

    source: Literal["digits", "cifar10", "cifar100", "imagenet", "images", "npz", "synthetic"] = "digits"
    """Digits are in the package; images are pictures in folders train/CLASS and val/CLASS, or packed; imagenet is such
    a folder too; npz is a file of arrays; synthetic is noise that depends on the class."""
    root: str = ""
    """Folder that holds the archives or extracted files (CIFAR), or the pictures; npz: the file, with train_images,
    train_labels, test_images, test_labels."""
    image_shape: tuple[int, ...] = ()
    """Height, width, channels; of pictures and synthetic, where empty means 224 224 3 and 32 32 3."""
    num_classes: int = 0
    """Synthetic, where 0 means 10; of files: what was found in them, which a run writes down."""
    train_examples: int = 0
    """Likewise; 0 means 2048."""
    test_examples: int = 0
    """Likewise; 0 means 512."""
    on_error: Literal["skip", "stop"] = "skip"
    """What becomes of a picture that cannot be read: it is named and counts for nothing, or the run stops."""
    workers: int = 0
    """Threads that read pictures ahead; 0: as many as this process may use cores, 16 at most."""
    least_area: float = 0.08
    """Smallest share of a picture that a random crop shows."""
    crop_padding: int = 0
    """Random crop after padding every side with this many zero pixels."""
    flip: bool = False
    """Mirror half of the training images, left to right."""
    trivial_augment: bool = False
    """Do one operation of TrivialAugment, at one strength, to each training image."""
    sizes: tuple[int, ...] = ()
    """Sides to which training images are resized, one after the other, before they come in their own."""
    size_epochs: tuple[int, ...] = ()
    """Epochs at which each of `sizes` ends."""
    flip_test: bool = False
    """Evaluate the mean of each test image's logits and those of its mirror image."""
    mixup: float = 0.0
    """Mix each training image with another of its batch, in shares from Beta(this, this); 0 means off."""
    cutmix: float = 0.0
    """Paste a box of another image of its batch into each, its area from Beta(this, this); 0 means off."""

    @property
    def mixes(self) -> bool:
        """Whether training images are mixed with each other."""
        return self.mixup > 0 or self.cutmix > 0

    def sizes_from(self, epoch: int) -> tuple[int, ...]:
        """Returns the sides that are still to come from an epoch on, in order; the last one is 0.

        >>> DataConfig(sizes=(4, 6), size_epochs=(1, 3)).sizes_from(1)
        (6, 0)
        """
        ends = zip(self.sizes, self.size_epochs, strict=True)
        return (*dict.fromkeys(size for size, end in ends if epoch < end), 0)

    def size_at(self, epoch: int) -> int:
        """Returns the side of the training images of an epoch, from 0; 0: their own.

        >>> [DataConfig(sizes=(4, 6), size_epochs=(1, 3)).size_at(epoch) for epoch in range(4)]
        [4, 6, 6, 0]
        """
        return self.sizes_from(epoch)[0]

    def __post_init__(self) -> None:
        check_values(self, "data.")
        found = (self.num_classes, self.train_examples, self.test_examples)
        require(
            self.source in ("synthetic", *FROM_FILES) or not any(found),
            f"data.source={self.source} with data.num_classes, data.train_examples or data.test_examples",
            "these belong to data.source=synthetic",
        )
        require(
            self.source == "synthetic" or all(found) or not any(found),
            f"data.source={self.source} with data.num_classes={found[0]}, data.train_examples={found[1]} and "
            f"data.test_examples={found[2]}",
            "leave all three out: they are what is found",
        )
        require(0 < self.least_area <= 1, f"data.least_area={self.least_area}", "must be in (0, 1]")
        for option in ("num_classes", "train_examples", "test_examples", "crop_padding", "workers"):
            require(getattr(self, option) >= 0, f"data.{option}={getattr(self, option)}", "must not be negative")
        require(
            len(self.sizes) == len(self.size_epochs) and all(0 < size <= 4096 for size in self.sizes),
            f"data.sizes={self.sizes} with data.size_epochs={self.size_epochs}",
            "each size, from 1 to 4096, needs the epoch at which it ends",
        )
        require(
            list(self.size_epochs) == sorted(set(self.size_epochs)) and min(self.size_epochs, default=1) > 0,
            f"data.size_epochs={self.size_epochs}",
            "must increase, and be positive",
        )
        for option in ("mixup", "cutmix"):
            value = getattr(self, option)
            require(value == 0 or 1e-3 <= value <= 1e3, f"data.{option}={value}", "must be from 0.001 to 1000, or 0")
        require(
            self.source in ("synthetic", "imagenet", "images") or not self.image_shape,
            f"data.source={self.source} with data.image_shape={self.image_shape}",
            "its images have one shape; leave data.image_shape out",
        )
        shape = self.image_shape
        require(
            not shape or (len(shape) == 3 and min(shape) > 0 and math.prod(shape) < _INT_LIMIT),
            f"data.image_shape={shape}",
            "must be height, width, channels, all positive, less than 2^31 bytes in all",
        )
        require(
            self.source not in ("images", "imagenet") or shape[2:] in ((), (3,)),
            f"data.source={self.source} with data.image_shape={shape}",
            "pictures have three channels",
        )


@dataclass(frozen=True)
class ModelConfig:
    """Which ResNet."""

    __pydantic_config__ = FORBID

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
    blur_pool: bool = False
    """Blur before every stride of a block, and behind the stem's max-pool (anti-aliased)."""
    drop_path: float = 0.0
    """Share of the examples for which the last block's residual branch is left out; less in earlier ones."""
    dropout: float = 0.0
    """Share of the pooled features that are dropped before the classifier."""

    def __post_init__(self) -> None:
        check_values(self, "model.")
        for option in ("drop_path", "dropout"):
            value = getattr(self, option)
            require(0 <= value < 0.99, f"model.{option}={value}", "must be in [0, 0.99)")
        require(0 <= self.width <= 2**16, f"model.width={self.width}", "must be from 1 to 65536, or 0 for the paper's")


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
