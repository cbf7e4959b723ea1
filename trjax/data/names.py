"""What classes are called."""

from contextlib import suppress

from trjax.config.data import DataConfig
from trjax.data.splits import open_splits

_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree
wolf woman worm
"""
_NAMES = {"digits": "0 1 2 3 4 5 6 7 8 9", "cifar10": _CIFAR10, "cifar100": _CIFAR100}


def class_names(data: DataConfig, num_classes: int) -> tuple[str, ...]:
    """Returns the name of every class, in the order of the labels.

    >>> class_names(DataConfig(source="cifar10"), 10)[3], class_names(DataConfig(source="synthetic"), 2)
    ('cat', ('class 0', 'class 1'))
    """
    known = tuple(_NAMES.get(data.source, "").split())
    if data.source in ("images", "imagenet") and data.root:
        with suppress(ValueError):  # the images are no longer there
            known = open_splits(data.root)[0].classes
    return known or tuple(f"class {index}" for index in range(num_classes))
