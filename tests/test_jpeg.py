"""JPEG files of which a crop's rows are decoded: the pixels of the whole image, and no others."""

import io
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from trjax.data.jpeg import BadImageError, Jpeg, encode_jpeg, open_jpeg

HEIGHT, WIDTH = 203, 150  # neither is a whole number of blocks


def scene() -> np.ndarray:
    """Light, dark and colours, of all sizes."""
    random = np.random.default_rng(0)
    sizes = [cv2.resize(random.normal(0, 40, (side, side, 3)), (WIDTH, HEIGHT)) for side in (3, 10, 30, 100)]
    return np.sum([np.full_like(sizes[0], 128), *sizes], axis=0).clip(0, 255).astype(np.uint8)


def saved(mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(scene()).convert(mode).save(file, "JPEG", quality=90, **options)
    return file.getvalue()


FILES = {
    "ours": encode_jpeg(scene(), 90),
    "4:2:0": saved(subsampling=2),
    "4:2:2": saved(subsampling=1),
    "4:4:4": saved(subsampling=0),
    "grey": saved("L"),
    "rows of 4:4:4": saved(subsampling=0, restart_marker_rows=1),
    "rows of grey": saved("L", restart_marker_rows=1),
    "two rows": saved(subsampling=2, restart_marker_rows=2),
    "half rows": saved(subsampling=2, restart_marker_blocks=5),
    "progressive": saved(progressive=True),
    "comment": saved(comment=b"\xff\xd0\xff\xd9\xff\xda"),
}


def open_one(name: str) -> Jpeg:
    opened = open_jpeg(FILES[name])
    assert opened
    return opened


def whole(data: bytes, scale: float) -> np.ndarray:
    size = {"min_height": -(-HEIGHT * scale // 1), "min_width": -(-WIDTH * scale // 1), "min_factor": 2}
    return simplejpeg.decode_jpeg(data, fastdct=True, fastupsample=True, **(size if scale < 1 else {}))


@given(st.sampled_from(sorted(FILES)), st.integers(0, HEIGHT - 1), st.integers(1, HEIGHT), st.floats(0.05, 1.2))
def test_rows_are_those_of_the_whole_image(name: str, top: int, height: int, share: float) -> None:
    bottom = min(top + height, HEIGHT)
    pixels, first, scale = open_one(name).decode_rows(top, bottom, share)
    assert (scale >= share > scale / 2) or scale in (1, 1 / 8)
    assert first <= top * scale
    assert first + len(pixels) >= bottom * scale
    np.testing.assert_array_equal(pixels, whole(FILES[name], scale)[first : first + len(pixels)])


@pytest.mark.parametrize("name", sorted(FILES))
def test_few_other_rows_are_decoded(name: str) -> None:
    pixels, first, _ = open_one(name).decode_rows(100, 110, 1.0)
    if name in ("ours", "rows of 4:4:4", "rows of grey"):
        assert first >= 100 - 15
        assert len(pixels) <= 32
    elif name in ("two rows", "half rows", "progressive"):
        assert len(pixels) == HEIGHT
    else:
        assert (first, len(pixels)) == (0, 112)


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("kept", [0.3, 0.6, 0.97])
def test_what_ends_early_is_damaged_whatever_rows_are_read(name: str, kept: float) -> None:
    data = FILES[name][: int(len(FILES[name]) * kept)]
    for top in (0, 100, HEIGHT - 20):
        with pytest.raises(BadImageError, match="it is damaged"):
            Jpeg(data, HEIGHT, WIDTH).decode_rows(top, top + 20, 1.0)


def test_damage_shows_in_the_rows_where_it_is() -> None:
    data = FILES["ours"]
    third = data.index(b"\xff\xd1") + 2
    harmed = Jpeg(data[: third + 9] + bytes(40) + data[third + 49 :], HEIGHT, WIDTH)
    for top in (0, 48, 100):
        harmed.decode_rows(top, top + 32, 1.0)
    with pytest.raises(BadImageError, match="it is damaged"):
        harmed.decode_rows(32, 48, 1.0)
    with pytest.raises(BadImageError, match="it is damaged"):
        harmed.decode()


def test_a_missing_row_is_reported() -> None:
    data = FILES["ours"]
    start, stop = data.index(b"\xff\xd1"), data.index(b"\xff\xd2")
    with pytest.raises(BadImageError, match="it is damaged"):
        Jpeg(data[:start] + data[stop:], HEIGHT, WIDTH).decode_rows(150, 170, 1.0)


@pytest.mark.parametrize("name", ["ours", "4:2:0"])
@pytest.mark.parametrize("more", ["comment", "restart", "image", "zeros"])
def test_what_follows_the_rows_does_no_harm(name: str, more: str) -> None:
    data = FILES[name]
    inside = {"comment": b"\xff\xfe\x00\x04ab", "restart": b"\xff\xd4", "zeros": bytes(9)}.get(more, b"")
    behind = FILES["ours"] if more == "image" else b""
    longer = data[:-2] + inside + data[-2:] + behind
    for top in (0, 100):
        pixels, first, _ = Jpeg(longer, HEIGHT, WIDTH).decode_rows(top, top + 20, 1.0)
        np.testing.assert_array_equal(pixels, whole(data, 1.0)[first : first + len(pixels)])


def test_without_markers_only_a_whole_image_tells_that_codes_went_wrong() -> None:
    """What training takes, and `verify` finds."""
    data = FILES["4:2:0"]
    at = len(data) // 3
    harmed = Jpeg(data[:at] + bytes(12) + data[at + 12 :], HEIGHT, WIDTH)
    harmed.decode_rows(0, 120, 1.0)
    with pytest.raises(BadImageError, match="it is damaged"):
        harmed.decode()


def test_what_we_encode_keeps_the_image() -> None:
    ours, pillows = (np.abs(whole(FILES[name], 1.0) - scene().astype(float)).mean() for name in ("ours", "4:2:0"))
    assert ours < 1.05 * pillows
    assert simplejpeg.decode_jpeg_header(FILES["ours"]) == (HEIGHT, WIDTH, "YCbCr", "420")
    assert len(FILES["ours"]) < 1.02 * len(FILES["4:2:0"])
