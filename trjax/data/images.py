"""From the bytes of a picture to pixels of the size that a network gets: crops that depend on an example alone."""

import io
import math
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import cv2
import numpy as np
import simplejpeg
from PIL import Image, ImageOps

MOST_PIXELS = 100_000_000
"""Of a picture; one that claims more is refused before it is decoded."""
LEAST_RATIO, MOST_RATIO = 3 / 4, 4 / 3
"""Width by height of a random crop. Source: Szegedy et al., "Going deeper with convolutions", 2015."""
CENTRE = 0.875
"""Share of the shorter side that an evaluation sees: 224 of 256. Source: Krizhevsky et al., 2012."""
_LEAST_LOG, _MOST_LOG = math.log(LEAST_RATIO), math.log(MOST_RATIO)
_TRIES = 10
_BLURRED = 1.5  # shrunk by more than this, a picture is blurred before it is sampled
_DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")

_MOST_KEPT = 2**23  # bytes; larger pictures are rare
_OWN = threading.local()

Box = tuple[int, int, int, int]
"""Top, left, height, width."""


class BadImageError(ValueError):
    """Bytes that are no picture, or not a whole one."""


cv2.setNumThreads(1)  # examples are decoded side by side, each by one thread


def _check_size(height: int, width: int) -> None:
    if height * width > MOST_PIXELS:
        raise BadImageError(f"it claims {width} x {height} pixels, more than {MOST_PIXELS:,}")


def _decode_any(data: bytes) -> np.ndarray:
    """Decodes what Pillow reads: upright, its first frame, as 8-bit RGB."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about damaged metadata, and large pictures: their size is checked
            with Image.open(io.BytesIO(data)) as opened:
                _check_size(opened.height, opened.width)
                if opened.mode in _DEEP:
                    deep = np.asarray(opened, np.float64)
                    grey = (deep / (257 if deep.max() > 255 else 1)).clip(0, 255).astype(np.uint8)
                    return np.repeat(grey[..., None], 3, axis=-1)
                return np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
    except BadImageError:
        raise
    except Image.UnidentifiedImageError as error:
        raise BadImageError("it is no picture") from error
    except Exception as error:  # Pillow's decoders raise nearly anything for damaged files
        raise BadImageError(f"it is damaged: {error}") from error


def _own_memory(name: str, size_bytes: int) -> np.ndarray | None:
    """Returns memory of this thread's, to be used again and again: new memory takes a fifth of the time."""
    if size_bytes > _MOST_KEPT:
        return None
    if getattr(_OWN, name, np.empty(0)).size < size_bytes:
        setattr(_OWN, name, np.empty(size_bytes, np.uint8))
    memory: np.ndarray = getattr(_OWN, name)[:size_bytes]
    return memory


def _decode_jpeg(data: bytes, height: int, width: int, share: float, fast: bool) -> np.ndarray:
    """Decodes a JPEG at the smallest of 1, 1/2, 1/4 and 1/8 that is not below a share: others are slower than 1."""
    scaled: dict[str, Any] = {"buffer": _own_memory("decoded", 3 * height * width)} if fast else {}
    if share <= 0.5:
        scaled |= {"min_height": math.ceil(height * share), "min_width": math.ceil(width * share), "min_factor": 2}
    try:
        return simplejpeg.decode_jpeg(data, fastdct=fast, fastupsample=fast, **scaled)
    except ValueError as error:
        raise BadImageError(f"it is damaged: {error}") from error


def plain_size(data: bytes) -> tuple[int, int] | None:
    """Returns the height and width of a JPEG that needs no Pillow: upright, grey or of three colours; None of others.

    Raises:
        BadImageError: its header is damaged, or it claims to be huge.
    """
    if not simplejpeg.is_jpeg(data) or b"Exif\0\0" in data[:4096]:  # that may turn it
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError as error:
        raise BadImageError(f"it is damaged: {error}") from error
    _check_size(height, width)
    return None if colours in ("CMYK", "YCCK") else (height, width)


def open_picture(data: bytes) -> tuple[int, int, Callable[[float, bool], np.ndarray]]:
    """Returns a picture's height and width, and what decodes it to uint8, shape (height, width, 3).

    That takes the smallest share of its size that will do, and whether it is to be fast: colours are a little less
    exact, and the pixels hold until this thread decodes another. A JPEG may come in half of its size, a quarter, or an
    eighth.

    Args:
        data: of a JPEG file, or anything else that Pillow reads.

    Raises:
        BadImageError: it is no picture, is cut off or otherwise damaged, or claims to be huge; some files say so
            when they are decoded.
    """
    if not data:
        raise BadImageError("it is empty")
    if size := plain_size(data):
        return *size, partial(_decode_jpeg, data, *size)
    pixels = _decode_any(data)
    return *pixels.shape[:2], lambda share, fast: pixels


def draw_box(random: np.random.Generator, height: int, width: int, least_area: float) -> Box:
    """Returns a random crop: its area uniform from `least_area` of the picture up, the logarithm of its ratio uniform.

    Source: Szegedy et al., 2015; after ten that do not fit, the largest in the middle whose ratio is allowed.
    """
    for _ in range(_TRIES):
        area = height * width * random.uniform(least_area, 1)
        ratio = math.exp(random.uniform(_LEAST_LOG, _MOST_LOG))
        own_width, own_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < own_width <= width and 0 < own_height <= height:
            top = int(random.integers(height - own_height + 1))  # each by itself: an array of two takes longer
            return top, int(random.integers(width - own_width + 1)), own_height, own_width
    own_width = max(1, min(width, round(height * MOST_RATIO)))
    own_height = max(1, min(height, round(width / LEAST_RATIO)))
    return (height - own_height) // 2, (width - own_width) // 2, own_height, own_width


def example_random(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Returns the random numbers of one example in one epoch: the same for any worker, in any order.

    Source: Philox 4x64, Salmon et al., 2011. The order of an epoch has the same key and begins at another counter.
    """
    counter = np.array([0, 0, 0, index + 1], np.uint64)
    return np.random.Generator(np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=counter))


def read_for_training(
    data: bytes, size: tuple[int, int], random: np.random.Generator, least_area: float, out: np.ndarray | None = None
) -> np.ndarray:
    """Returns a random crop of a picture, uint8, shape (*size, 3).

    Args:
        data: of its file.
        size: height and width to come to.
        random: of the example.
        least_area: smallest share of the picture that a crop may be.
        out: where to put it.

    Raises:
        BadImageError: see `open_picture`.
    """
    height, width, decode = open_picture(data)
    top, left, own_height, own_width = draw_box(random, height, width, least_area)
    pixels = decode(max(size[0] / own_height, size[1] / own_width), True)
    down, right = pixels.shape[0] / height, pixels.shape[1] / width  # both 1 if it has its own size
    rows = slice(round(top * down), max(round((top + own_height) * down), round(top * down) + 1))
    columns = slice(round(left * right), max(round((left + own_width) * right), round(left * right) + 1))
    crop = pixels[rows, columns]
    if max(crop.shape[0] / size[0], crop.shape[1] / size[1]) > _BLURRED:
        memory = _own_memory("blurred", crop.size)
        own = None if memory is None else memory.reshape(crop.shape)
        crop = cv2.blur(crop, (2, 2), dst=own)  # or lines thinner than a pixel would come and go
    return cv2.resize(crop, size[::-1], dst=out, interpolation=cv2.INTER_LINEAR)


def read_for_evaluation(data: bytes, size: tuple[int, int]) -> np.ndarray:
    """Returns the middle of a picture, `CENTRE` of what fits, uint8, shape (*size, 3).

    Raises:
        BadImageError: see `open_picture`.
    """
    height, width, decode = open_picture(data)
    pixels, scale = decode(1.0, False), min(height / size[0], width / size[1]) * CENTRE
    own_height, own_width = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
    top, left = (height - own_height) // 2, (width - own_width) // 2
    crop = pixels[top : top + own_height, left : left + own_width]
    return cv2.resize(crop, size[::-1], interpolation=cv2.INTER_AREA if scale > 1 else cv2.INTER_LINEAR)
