"""From the bytes of an image to pixels of the size that a network gets: crops that depend on an example alone."""

import io
import math
import warnings
from dataclasses import dataclass
from random import Random

import cv2
import numpy as np
from PIL import Image, ImageOps

from trjax.data.jpeg import BadImageError, Jpeg, Rows, check_size, open_jpeg, own_memory

LEAST_RATIO, MOST_RATIO = 3 / 4, 4 / 3
"""Width by height of a random crop. Source: Szegedy et al., "Going deeper with convolutions", 2015."""
CENTRE = 0.875
"""Share of the shorter side that an evaluation sees: 224 of 256. Source: Krizhevsky et al., 2012."""
_LEAST_LOG, _MOST_LOG = math.log(LEAST_RATIO), math.log(MOST_RATIO)
_TRIES = 10
_BLURRED = 1.5  # shrunk by more, pixels are weighted 1:2:1 first: about as wide as the triangle that antialiasing takes
_DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")

Box = tuple[int, int, int, int]
"""Top, left, height, width."""

cv2.setNumThreads(1)  # examples are decoded side by side, each by one thread


def _decode_any(data: bytes) -> np.ndarray:
    """Decodes what Pillow reads: upright, its first frame, as 8-bit RGB."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about damaged metadata, and large images: their size is checked
            with Image.open(io.BytesIO(data)) as opened:
                check_size(opened.height, opened.width)
                if opened.mode in _DEEP:
                    deep = np.asarray(opened, np.float64)
                    grey = (deep / (257 if deep.max() > 255 else 1)).clip(0, 255).astype(np.uint8)
                    return np.repeat(grey[..., None], 3, axis=-1)
                return np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
    except BadImageError:
        raise
    except Image.UnidentifiedImageError as error:
        raise BadImageError("it is no image") from error
    except Exception as error:  # Pillow's decoders raise nearly anything for damaged files
        raise BadImageError(f"it is damaged: {error}") from error


@dataclass(frozen=True)
class Pixels:
    """An image that was decoded when it was opened.

    Attributes:
        pixels: uint8, shape (height, width, 3).
        height: of the image, in pixels.
        width: of the image, in pixels.
    """

    pixels: np.ndarray
    height: int
    width: int

    def decode(self, share: float = 1.0) -> np.ndarray:
        """Returns all of it, whatever share would do."""
        return self.pixels

    def decode_rows(self, top: int, bottom: int, share: float) -> Rows:
        """Returns some rows, as they are."""
        return Rows(self.pixels[top:bottom], top, 1)


def open_image(data: bytes) -> Jpeg | Pixels:
    """Opens an image.

    Args:
        data: of a JPEG file, or anything else that Pillow reads.

    Raises:
        BadImageError: it is no image, is cut off or otherwise damaged, or claims to be huge; some files say so
            when they are decoded.
    """
    if not data:
        raise BadImageError("it is empty")
    if (jpeg := open_jpeg(data)) is not None:
        return jpeg
    pixels = _decode_any(data)
    return Pixels(pixels, *pixels.shape[:2])


def draw_box(random: Random, height: int, width: int, least_area: float) -> Box:
    """Returns a random crop: its area uniform from `least_area` of the image up, the logarithm of its ratio uniform.

    Source: Szegedy et al., 2015; after ten that do not fit, the largest in the middle whose ratio is allowed.
    """
    for _ in range(_TRIES):
        area = height * width * (least_area + (1 - least_area) * random.random())
        ratio = math.exp(_LEAST_LOG + (_MOST_LOG - _LEAST_LOG) * random.random())
        own_width, own_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < own_width <= width and 0 < own_height <= height:
            top = int((height - own_height + 1) * random.random())
            return top, int((width - own_width + 1) * random.random()), own_height, own_width
    own_width = max(1, min(width, round(height * MOST_RATIO)))
    own_height = max(1, min(height, round(width / LEAST_RATIO)))
    return (height - own_height) // 2, (width - own_width) // 2, own_height, own_width


def example_random(seed: int, epoch: int, index: int) -> Random:
    """Returns the random numbers of one example in one epoch: the same for any worker, in any order.

    Of its methods `random` alone gives the same numbers in every version of Python. (NumPy's generators take five times
    as long to make and to ask.)
    """
    return Random(f"example {seed} {epoch} {index}")


def read_for_training(
    data: bytes, size: tuple[int, int], random: Random, least_area: float, out: np.ndarray | None = None
) -> np.ndarray:
    """Returns a random crop of an image, uint8, shape (*size, 3).

    Args:
        data: of its file.
        size: height and width to come to.
        random: of the example.
        least_area: smallest share of the image that a crop may be.
        out: where to put it.

    Raises:
        BadImageError: see `open_image`.
    """
    image = open_image(data)
    top, left, height, width = draw_box(random, image.height, image.width, least_area)
    pixels, first, scale = image.decode_rows(top, top + height, max(size[0] / height, size[1] / width))
    start, stop = round(top * scale) - first, round((top + height) * scale) - first
    rows = slice(start, max(stop, start + 1))
    columns = slice(round(left * scale), max(round((left + width) * scale), round(left * scale) + 1))
    crop = pixels[rows, columns]
    blurred = [3 if own > _BLURRED * wanted else 1 for own, wanted in zip(crop.shape[:2], size, strict=True)]
    if max(blurred) > 1:  # or lines thinner than a pixel would come and go
        own = own_memory("blurred", crop.size).reshape(crop.shape)
        crop = cv2.GaussianBlur(crop, blurred[::-1], 0, dst=own)
    return cv2.resize(crop, size[::-1], dst=out, interpolation=cv2.INTER_LINEAR)


def read_for_evaluation(data: bytes, size: tuple[int, int]) -> np.ndarray:
    """Returns the middle of an image, `CENTRE` of what fits, uint8, shape (*size, 3).

    Raises:
        BadImageError: see `open_image`.
    """
    pixels = open_image(data).decode()
    height, width = pixels.shape[:2]
    scale = min(height / size[0], width / size[1]) * CENTRE
    own_height, own_width = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
    top, left = (height - own_height) // 2, (width - own_width) // 2
    crop = pixels[top : top + own_height, left : left + own_width]
    return cv2.resize(crop, size[::-1], interpolation=cv2.INTER_AREA if scale > 1 else cv2.INTER_LINEAR)
