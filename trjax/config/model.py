"""Options of the model."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from trjax.config.checks import Checked
from trjax.config.fields import zero_or

_CifarFamily = Literal["resnet8", "resnet14", "resnet20", "resnet32", "resnet44", "resnet56", "resnet110"]
_ImageNetFamily = Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
_Share = Annotated[float, Field(ge=0, lt=0.99)]


@dataclass(frozen=True)
class ModelConfig(Checked):
    """Which ResNet."""

    section = "model."

    arch: Literal[_CifarFamily, _ImageNetFamily] = "resnet8"
    """8 to 110 (6n+2): He et al.'s CIFAR family; 18 to 152: the ImageNet family, v1.5."""
    stem: Literal["default", "imagenet", "cifar"] = "default"
    """Imagenet: 7x7 stride 2 and max-pool; cifar: 3x3 stride 1; default: the family's."""
    width: Annotated[int, zero_or(1, 2**16, "for the paper's width")] = 0
    """Channels of the first stage; 0 means the paper's, 16 or 64."""
    blur_pool: bool = False
    """Blur before every stride of a block, and behind the stem's max-pool (anti-aliased)."""
    drop_path: _Share = 0.0
    """Share of the examples for which the last block's residual branch is left out; less in earlier ones."""
    dropout: _Share = 0.0
    """Share of the pooled features that are dropped before the classifier."""
