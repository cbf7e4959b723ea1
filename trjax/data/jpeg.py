"""JPEG files, decoded as far as a crop of them needs it: at the scale that will do, and the rows that it covers.

Decoders of whole images do this too, if the file is cut first. A baseline JPEG holds its rows of blocks in order, so
what follows a crop is left undecoded once the header says that the image ends there. What precedes it can be cut away
where every row of blocks ends with a restart marker, as in files that are packed here. Source: ITU-T T.81, annex B.
"""

import math
import re
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import cv2
import numpy as np
import simplejpeg

MOST_PIXELS = 100_000_000
"""Of an image; one that claims more is refused before it is decoded."""
_MOST_KEPT = 2**23  # bytes; larger images are rare
_OWN = threading.local()
_FRAMES, _OTHER_FRAMES = (0xC0, 0xC1), (*range(0xC2, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
_SCAN, _INTERVAL, _END = 0xDA, 0xDD, b"\xff\xd9"
_RESTARTS, _RESTART = tuple(bytes((0xFF, 0xD0 + number)) for number in range(8)), re.compile(rb"\xff[\xd0-\xd7]")
_UNREAD = "extraneous bytes before marker"  # what the decoder says if rows are left when the image ends
_BLOCK = 8
_SAVED = 0.05  # of an image's rows; less is not worth a cut


class BadImageError(ValueError):
    """Bytes that are no image, or not a whole one."""


def check_size(height: int, width: int) -> None:
    """Raises BadImageError if an image claims to be huge."""
    if height * width > MOST_PIXELS:
        raise BadImageError(f"it claims {width} x {height} pixels, more than {MOST_PIXELS:,}")


def own_memory(name: str, size_bytes: int) -> np.ndarray:
    """Returns memory of this thread's, to be used again and again: a new allocation costs a fifth of a read."""
    if size_bytes > _MOST_KEPT:
        return np.empty(size_bytes, np.uint8)
    if getattr(_OWN, name, np.empty(0)).size < size_bytes:
        setattr(_OWN, name, np.empty(size_bytes, np.uint8))
    memory: np.ndarray = getattr(_OWN, name)[:size_bytes]
    return memory


class Rows(NamedTuple):
    """Some rows of an image.

    Attributes:
        pixels: uint8, shape (rows, width, 3), at a scale.
        first: the first row, counted at that scale.
        scale: 1, 1/2, 1/4 or 1/8.
    """

    pixels: np.ndarray
    first: int
    scale: float


class _Layout(NamedTuple):
    """Where a baseline JPEG has what a cut changes.

    Attributes:
        height_at: position of the height in the header.
        block: height of a row of blocks (T.81's MCUs), in pixels.
        rows_at: position of the first row of blocks, if restart markers part them.
    """

    height_at: int
    block: int
    rows_at: int | None


def _find_layout(data: bytes) -> _Layout | None:
    """Returns where the header ends and what it says; None if rows do not come one after the other in one scan."""
    at, interval, height_at, block, a_row, components = 2, 0, 0, 0, 0, 0
    while at + 4 <= len(data) and data[at] == 0xFF:
        kind, end = data[at + 1], at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if kind in _OTHER_FRAMES or end > len(data):
            return None
        if kind == _INTERVAL:
            interval = int.from_bytes(data[at + 4 : at + 6], "big")
        elif kind in _FRAMES:
            height_at, components = at + 5, data[at + 9]
            factors = data[at + 11 : end : 3] if components > 1 else b"\x11"  # blocks of one component are not grouped
            block = _BLOCK * max(factor & 15 for factor in factors)
            width = int.from_bytes(data[at + 7 : at + 9], "big")
            a_row = -(-width // (_BLOCK * max(factor >> 4 for factor in factors)))
        elif kind == _SCAN:
            parted = data[at + 4] == components and interval in (0, a_row)
            return _Layout(height_at, block, end if interval else None) if parted and block else None
        at = end
    return None


class _Cut(NamedTuple):
    """A file of some rows of another.

    Attributes:
        data: of the file.
        first: of its rows of pixels.
        last: the row after its last.
        unread: it holds more than these rows.
    """

    data: bytes
    first: int
    last: int
    unread: bool = False


def _cut(data: bytes, height: int, top: int, bottom: int) -> _Cut:
    """Returns a file with the rows from `top` to `bottom`, and few others."""
    layout = _find_layout(data)
    if layout is None:
        return _Cut(data, 0, height)
    height_at, block, rows_at = layout
    start, stop = top // block if rows_at else 0, -(-bottom // block)
    first, last = start * block, min(stop * block, height)
    if last - first > (1 - _SAVED) * height:
        return _Cut(data, 0, height)
    header = data[:height_at], (last - first).to_bytes(2, "big")
    if rows_at is None:
        return _Cut(b"".join((*header, data[height_at + 2 :])), first, last, unread=True)
    rows = _RESTART.split(data[rows_at : max(rows_at, data.rfind(_END))])
    if len(rows) != -(-height // block):  # some are missing, or something else follows: let the decoder judge
        return _Cut(data, 0, height)
    parts = [*header, data[height_at + 2 : rows_at], rows[start]]
    for number, row in enumerate(rows[start + 1 : stop]):
        parts += (_RESTARTS[number % 8], row)
    return _Cut(b"".join((*parts, _END)), first, last)


@dataclass(frozen=True)
class Jpeg:
    """A JPEG file of an image that is upright, and grey or of three colours.

    Attributes:
        data: of the file.
        height: of the image, in pixels.
        width: the same.
    """

    data: bytes
    height: int
    width: int

    def decode(self, share: float = 1.0) -> np.ndarray:
        """Returns all of it, uint8, shape (height, width, 3), or at a smaller scale.

        Args:
            share: of its size that will do.

        Raises:
            BadImageError: it is cut off or otherwise damaged.
        """
        return _decode(self.data, self.height, self.width, _choose_scale(share))

    def decode_rows(self, top: int, bottom: int, share: float) -> Rows:
        """Returns at least the rows from `top` to `bottom`, fast: colours are a little less exact.

        The pixels hold until this thread decodes another. Damage elsewhere need not show; nor, in files without restart
        markers, what leaves codes that can be read: only the end of a whole image shows that something went wrong.

        Args:
            top: first row, of the image.
            bottom: the row after the last.
            share: of its size that will do.

        Raises:
            BadImageError: it is cut off or otherwise damaged.
        """
        scale = _choose_scale(share)
        data, first, last, unread = _cut(self.data, self.height, top, bottom)
        height, width = math.ceil((last - first) * scale), math.ceil(self.width * scale)
        memory = own_memory("decoded", 3 * height * width)
        try:
            _decode(data, last - first, self.width, scale, fastdct=True, fastupsample=True, buffer=memory)
        except BadImageError as error:
            if not (unread and _UNREAD in str(error)):
                raise
        return Rows(memory.reshape(height, width, 3), int(first * scale), scale)


def _choose_scale(share: float) -> float:
    """Returns the smallest of 1, 1/2, 1/4 and 1/8 that is not below a share: what lies between takes longer than 1."""
    return next(scale for scale in (1 / 8, 1 / 4, 1 / 2, 1) if scale >= min(share, 1))


def _decode(data: bytes, height: int, width: int, scale: float, **options: Any) -> np.ndarray:
    if scale < 1:
        options |= {"min_height": math.ceil(height * scale), "min_width": math.ceil(width * scale), "min_factor": 2}
    try:
        return simplejpeg.decode_jpeg(data, **options)
    except ValueError as error:
        raise BadImageError(f"it is damaged: {error}") from error


def open_jpeg(data: bytes) -> Jpeg | None:
    """Returns a JPEG that needs no Pillow: upright, grey or of three colours; None of others.

    Raises:
        BadImageError: its header is damaged, or it claims to be huge.
    """
    if not simplejpeg.is_jpeg(data) or b"Exif\0\0" in data[:4096]:  # that may turn it
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError as error:
        raise BadImageError(f"it is damaged: {error}") from error
    check_size(height, width)
    return None if colours in ("CMYK", "YCCK") else Jpeg(data, height, width)


def encode_jpeg(pixels: np.ndarray, quality: int) -> bytes:
    """Returns a JPEG file, colours at half of the resolution, whose rows can be read by themselves.

    Args:
        pixels: RGB, uint8, shape (height, width, 3).
        quality: from 1 to 100.
    """
    sampled = int(cv2.IMWRITE_JPEG_SAMPLING_FACTOR), int(cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420)
    parted = int(cv2.IMWRITE_JPEG_RST_INTERVAL), -(-pixels.shape[1] // (2 * _BLOCK))
    how = (int(cv2.IMWRITE_JPEG_QUALITY), quality, *sampled, *parted)
    return bytes(cv2.imencode(".jpg", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), how)[1])
