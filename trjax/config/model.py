"""Options of the model."""

from dataclasses import dataclass
from typing import Literal

from trjax.config.checks import FORBID, check_values, require


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
