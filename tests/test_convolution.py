"""Convolutions on the CPU: what XLA's own compute, gradients too, written otherwise."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec
from jax.test_util import check_grads

from trjax.models.convolution import convolve

DIMS = ("NHWC", "HWIO", "NHWC")
SHAPES = [
    (8, 9, 3, 1, 1),
    (8, 9, 3, 2, 1),
    (9, 8, 3, 2, 1),
    (9, 8, 1, 2, 0),
    (5, 5, 1, 1, 0),
    (11, 8, 7, 2, 3),
    (7, 7, 2, 3, 0),
    (2, 2, 3, 1, 1),
    (2, 1, 3, 2, 1),
    (1, 1, 3, 1, 1),
    (2, 5, 3, 1, 1),
]
"""Height, width, side of the kernel, stride, padding."""


def arrays(height: int, width: int, side: int) -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(0)
    shapes = (3, height, width, 4), (side, side, 4, 6)
    return tuple(jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes)  # type: ignore[return-value]


def wavy_sum(way: Callable[..., jax.Array], stride: int, pad: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.sin(way(x, kernel, (stride, stride), [(pad, pad)] * 2, dimension_numbers=DIMS)).sum()


@pytest.mark.parametrize(("height", "width", "side", "stride", "pad"), SHAPES)
def test_values_and_gradients_are_those_of_xla(height: int, width: int, side: int, stride: int, pad: int) -> None:
    own, other = (
        jax.jit(jax.value_and_grad(partial(wavy_sum, way, stride, pad), (0, 1)))(*arrays(height, width, side))
        for way in (convolve, jax.lax.conv_general_dilated)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), own, other)


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((0, 8, 9, 4), (3, 3, 4, 6)), {}),
        (((2, 2, 5, 4), (3, 3, 4, 6)), {}),
        (((2, 8, 9, 4), (3, 3, 4, 6)), {"rhs_dilation": (2, 2)}),
        (((2, 8, 9, 4), (3, 3, 2, 6)), {"feature_group_count": 2}),
        (((4, 8, 9, 4), (3, 3, 4, 6)), {"batch_group_count": 2}),
        (((2, 4, 8, 9), (6, 4, 3, 3)), {"dimension_numbers": None}),
    ],
)
def test_the_rest_is_left_to_jax(shapes: tuple[tuple[int, ...], ...], options: dict[str, Any]) -> None:
    own, other = (
        jax.grad(lambda x, k, way=way: way(x, k, (1, 1), [(0, 0)] * 2, **{"dimension_numbers": DIMS} | options).sum())
        for way in (convolve, jax.lax.conv_general_dilated)
    )
    x, kernel = (jnp.ones(shape) for shape in shapes)
    np.testing.assert_array_equal(own(x, kernel), other(x, kernel))


@pytest.mark.parametrize(("height", "width", "side", "stride", "pad"), SHAPES[:3])
def test_gradients_are_slopes(height: int, width: int, side: int, stride: int, pad: int) -> None:
    check_grads(jax.jit(partial(wavy_sum, convolve, stride, pad)), arrays(height, width, side), 1, ["rev"], 0.02, 0.02)


def test_each_device_convolves_its_own_part() -> None:
    mesh, images = Mesh(np.array(jax.devices()[:2]), ("devices",)), arrays(8, 9, 3)[0][:2]
    kernel = arrays(8, 9, 3)[1]

    def gradients(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = jax.lax.pcast(kernel, "devices", to="varying")
        by_image, by_kernel = jax.grad(partial(wavy_sum, convolve, 1, 1), (0, 1))(x, own)
        return by_image, jax.lax.psum(by_kernel, "devices")

    specs = Spec("devices"), Spec()
    split = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs))(images, kernel)
    whole = jax.grad(partial(wavy_sum, jax.lax.conv_general_dilated, 1, 1), (0, 1))(images, kernel)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), split, whole)


def compiled(way: Callable[..., jax.Array], stride: int = 1, size: tuple[int, int] = (8, 9)) -> str:
    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return wavy_sum(way, stride, 1, jnp.maximum(jnp.sqrt(jnp.abs(x)) * 2 - 1, 0), kernel)

    text = jax.jit(jax.grad(loss, (0, 1))).lower(*arrays(*size, 3)).compile().as_text()
    assert text
    return text


def test_the_program_transposes_what_is_there() -> None:
    """Into a filter gradient's transposes XLA fuses what computes their input, unless it is kept out."""
    fused = r"%transpose\w*fusion[.\d]* = f32\[(4,8,9,3|8,9,3,6)\]"
    assert re.search(fused, compiled(jax.lax.conv_general_dilated))
    assert not re.search(fused, compiled(convolve))


def test_a_strided_gradient_has_no_convolution_with_holes() -> None:
    assert "lhs_dilate" in compiled(jax.lax.conv_general_dilated, stride=2)
    assert "lhs_dilate" not in compiled(convolve, stride=2)


def test_small_images_are_multiplied_with_matrices() -> None:
    """Of three convolutions the filter gradient is left."""
    texts = [compiled(way, size=(2, 2)) for way in (convolve, jax.lax.conv_general_dilated)]
    assert [len(re.findall(r" convolution\(", text)) for text in texts] == [1, 3]


def test_other_platforms_compile_what_they_did() -> None:
    texts = [
        jax.jit(jax.grad(partial(wavy_sum, way, 2, 1), (0, 1)))
        .trace(*arrays(8, 9, 3))
        .lower(lowering_platforms=("cuda",))
        .as_text()
        for way in (convolve, jax.lax.conv_general_dilated)
    ]
    for operation in ("convolution", "transpose", "pad", "reverse"):
        assert len({text.count(f"stablehlo.{operation}") for text in texts}) == 1, operation
