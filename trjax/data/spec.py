"""What is known of a source before it is loaded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DataSpec:
    """What a model needs to know of a source: enough to plan and compile without loading it.

    Attributes:
        image_shape: height, width, channels.
        num_classes: number of labels.
        train_examples: length of the training source.
        test_examples: length of the test source.
        mean: per channel, of pixels scaled to [0, 1].
        std: per channel, of pixels scaled to [0, 1].
    """

    image_shape: tuple[int, int, int]
    num_classes: int
    train_examples: int
    test_examples: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
