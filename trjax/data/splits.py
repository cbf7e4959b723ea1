"""The two splits of a folder of images, as files or packed."""

from pathlib import Path

from trjax.data.folders import index_folder
from trjax.data.image_files import ImageFiles
from trjax.data.shards import INDEX, UNFINISHED, open_shards

NAMES = (("train",), ("val", "test", "validation"))
"""What the folders of the training and of the test split may be called."""
SPLITS = tuple(name for names in NAMES for name in names)
"""All of them."""


def find_splits(folder: Path) -> dict[str, Path]:
    """Returns the folders of the splits in a folder, by name; none if it is not made of splits."""
    return {name: folder / name for name in SPLITS if (folder / name).is_dir()}


def find_split(root: Path, names: tuple[str, ...]) -> Path:
    """Returns the folder of a split.

    Raises:
        ValueError: there is none.
    """
    found = next((root / name for name in names if (root / name).is_dir()), None)
    if found is None:
        expected = " or ".join(f"{root / name}/CLASS/*.JPEG" for name in names)
        raise ValueError(f"data.root={root}: expected {expected}, or what `python -m trjax.data pack` makes of them")
    return found


def is_packed(folder: Path) -> bool:
    """Returns whether a folder is a packed split, complete or not."""
    return (folder / INDEX).exists() or (folder / UNFINISHED).exists() or any(folder.glob("*.array_record"))


def open_split(folder: Path) -> ImageFiles:
    """Returns the images of a split.

    Raises:
        ValueError: there are none, or what is packed is damaged.
    """
    try:
        return open_shards(folder) if is_packed(folder) else index_folder(folder)
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error}") from error


def open_splits(root: str) -> tuple[ImageFiles, ImageFiles]:
    """Returns the images of the training and of the test split.

    Raises:
        ValueError: one is missing or damaged, or they have other classes.
    """
    if not root:
        raise ValueError("data.root='': must be the folder of the images; pass --data.root")
    train, test = (open_split(find_split(Path(root), names)) for names in NAMES)
    if train.classes != test.classes:
        apart = sorted(set(train.classes) ^ set(test.classes))
        raise ValueError(f"data.root={root}: {len(apart)} classes are in one split alone, {apart[0]} for one")
    return train, test
