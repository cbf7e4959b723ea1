"""TrivialAugment's operations, against those of Pillow, which its authors used."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from trjax.data.augment import OPERATIONS, STRENGTHS, ImageOperation, apply_operation, draw_operation

SIZE = (24, 32)


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    """Smooth colours, and noise in one corner."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[: SIZE[0], : SIZE[1]] / 32
    smooth = np.stack([40 + 180 * x, 200 - 150 * y, 90 + 60 * np.sin(6 * (x + y))], -1)
    smooth[:8, :8] += random.normal(0, 30, (8, 8, 3))
    return smooth.clip(0, 255).astype(np.uint8)


_apply = jax.jit(apply_operation)


def ours(name: str, strength: float, image: np.ndarray) -> np.ndarray:
    operation = ImageOperation(jnp.int32(OPERATIONS.index(name)), jnp.float32(strength))
    return np.asarray(_apply(operation, jnp.asarray(image)))


def moved(image: np.ndarray, matrix: tuple[float, ...]) -> np.ndarray:
    """By the matrix from output to input, about the centre of the pixels."""
    a, b, c, d, e, f = matrix
    height, width, _ = image.shape
    cx, cy = width / 2, height / 2  # Pillow maps the pixels' centres, at a half
    data = (a, b, c + cx - a * cx - b * cy, d, e, f + cy - d * cx - e * cy)
    whole = Image.fromarray(image).transform((width, height), Image.Transform.AFFINE, data, Image.Resampling.NEAREST)
    return np.asarray(whole)


@pytest.mark.parametrize("strength", [-1.0, -0.3, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", OPERATIONS[1:6])
def test_pixels_move_as_in_pillow(name: str, strength: float, image: np.ndarray) -> None:
    angle = np.deg2rad(135 * strength)
    matrices: dict[str, tuple[float, ...]] = {
        "shear_x": (1, 0.99 * strength, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, 0.99 * strength, 1, 0),
        "translate_x": (1, 0, 32 * strength, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, 24 * strength),
        "rotate": (np.cos(angle), np.sin(angle), 0, -np.sin(angle), np.cos(angle), 0),
    }
    found, expected = ours(name, strength, image), moved(image, matrices[name])
    same = (found == expected).all(-1)
    assert same.mean() > 0.97  # a position halfway between two pixels may round to either


@pytest.mark.parametrize("strength", [-1.0, -0.4, 0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", ["brightness", "color", "contrast", "sharpness"])
def test_blends_are_those_of_pillow(name: str, strength: float, image: np.ndarray) -> None:
    enhance: Any = getattr(ImageEnhance, name.capitalize())
    expected = np.asarray(enhance(Image.fromarray(image)).enhance(1 + 0.99 * strength))
    assert np.abs(ours(name, strength, image).astype(int) - expected).max() <= 2  # Pillow rounds down in between


def test_toml_are_those_of_pillow(image: np.ndarray) -> None:
    pillow = Image.fromarray(image)
    for bits in range(2, 9):
        np.testing.assert_array_equal(ours("posterize", (8 - bits) / 6, image), ImageOps.posterize(pillow, bits))
    for threshold in (0, 51, 128, 255):
        expected = np.asarray(ImageOps.solarize(pillow, threshold))
        np.testing.assert_array_equal(ours("solarize", 1 - threshold / 255, image), expected)
    np.testing.assert_array_equal(ours("equalize", 1, image), ImageOps.equalize(pillow))
    stretched = np.asarray(ImageOps.autocontrast(pillow)).astype(int)
    assert np.abs(ours("autocontrast", 1, image).astype(int) - stretched).max() <= 1


@pytest.mark.parametrize("name", OPERATIONS)
def test_even_images_and_other_channels_are_no_trouble(name: str) -> None:
    for channels in (1, 3, 4):
        flat = np.full((8, 8, channels), 77, np.uint8)
        assert ours(name, 0.5, flat).shape == flat.shape
    if name in ("identity", "autocontrast", "equalize", "color", "contrast", "sharpness"):
        np.testing.assert_array_equal(ours(name, 1.0, np.full((8, 8, 3), 77, np.uint8)), 77)


def test_operations_and_strengths_are_drawn_evenly() -> None:
    drawn = jax.vmap(draw_operation)(jax.random.split(jax.random.key(0), 20_000))
    counts = np.bincount(np.asarray(drawn.which), minlength=len(OPERATIONS))
    assert np.abs(counts / 20_000 * len(OPERATIONS) - 1).max() < 0.1
    signed = (np.asarray(drawn.which) >= 1) & (np.asarray(drawn.which) < 10)
    steps = np.asarray(drawn.strength) * (STRENGTHS - 1)
    np.testing.assert_allclose(steps, steps.round(), atol=1e-4)
    assert (steps[~signed] >= 0).all()
    assert len(np.unique(steps[signed].round())) == 2 * STRENGTHS - 1
