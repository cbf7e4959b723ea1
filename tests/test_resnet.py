from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trjax.chain import init_chain
from trjax.plan import name_leaves
from trjax.resnet import ARCHITECTURES, Block, ConvNorm, make_resnet

pytestmark = pytest.mark.fast

PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnet20": 269_722,
}


@cache
def shapes(arch: str, **options: Any) -> dict[str, Any]:
    imagenet = ARCHITECTURES[arch].stem == "imagenet"
    chain = make_resnet(arch, num_classes=1000 if imagenet else 10, **options)
    image_shape = (64, 64, 3) if imagenet else (32, 32, options.get("channels", 3))
    params, _ = jax.eval_shape(lambda: init_chain(chain, jax.random.key(0), image_shape))
    return {name: leaf.shape for name, leaf in name_leaves(params).items()}


@pytest.mark.parametrize("arch", PARAMETERS)
def test_parameter_counts(arch: str) -> None:
    assert sum(int(np.prod(shape)) for shape in shapes(arch).values()) == PARAMETERS[arch]


@pytest.mark.parametrize("depth", [20, 32, 44, 56, 110])
def test_cifar_family_has_its_depth(depth: int) -> None:
    kernels = [shape for name, shape in shapes(f"resnet{depth}").items() if name.endswith("kernel")]
    assert len(kernels) == depth  # no projections: option A has no parameters


def test_widths_classes_and_channels_are_arguments() -> None:
    chain = make_resnet("resnet18", num_classes=7, width=8, stem="cifar")
    params, _ = jax.eval_shape(lambda: init_chain(chain, jax.random.key(0), (16, 16, 5)))
    named = name_leaves(params)
    assert named["stem/layer/conv/kernel"].shape == (3, 3, 5, 8)
    assert named["stage4_block2/layer2/conv/kernel"].shape == (3, 3, 64, 64)
    assert named["head/fc/kernel"].shape == (64, 7)


def test_bottleneck_strides_on_the_3x3() -> None:
    block = Block(4, 2, bottleneck=True, projection=True)
    x, mask = jnp.ones((1, 8, 8, 16)), jnp.ones(1)
    variables = block.init(jax.random.key(0), x, train=False, mask=mask)
    _, state = block.apply(variables, x, train=False, mask=mask, capture_intermediates=True, mutable=["intermediates"])
    sizes = {
        name: value["__call__"][0].shape[1:] for name, value in state["intermediates"].items() if name != "__call__"
    }
    assert sizes == {"layer1": (8, 8, 4), "layer2": (4, 4, 4), "layer3": (4, 4, 16), "shortcut": (4, 4, 16)}


def test_a_fresh_block_is_the_identity_after_relu() -> None:
    """The last scale of every block starts at 0 (Goyal et al.); option A keeps every second pixel."""
    x, mask = jax.random.normal(jax.random.key(1), (2, 4, 4, 4)), jnp.ones(2)
    same = Block(4, 1, bottleneck=False, projection=False)
    y: Any = same.apply(same.init(jax.random.key(0), x, train=False, mask=mask), x, train=False, mask=mask)
    np.testing.assert_array_equal(y, jax.nn.relu(x))
    halved = Block(8, 2, bottleneck=False, projection=False)
    y = halved.apply(halved.init(jax.random.key(0), x, train=False, mask=mask), x, train=False, mask=mask)
    np.testing.assert_array_equal(y[..., 2:6], jax.nn.relu(x[:, ::2, ::2]))
    assert not np.any(y[..., [0, 1, 6, 7]])


def test_computes_in_bfloat16_and_keeps_float32() -> None:
    layer = ConvNorm(4, 3, dtype=jnp.dtype("bfloat16"))
    x, mask = jax.random.normal(jax.random.key(1), (2, 4, 4, 3)), jnp.ones(2)
    variables = layer.init(jax.random.key(0), x, train=False, mask=mask)
    y: Any = layer.apply(variables, x, train=False, mask=mask)
    assert y.dtype == jnp.bfloat16
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(variables))
    exact: Any = ConvNorm(4, 3).apply(variables, x, train=False, mask=mask)
    np.testing.assert_allclose(y.astype(np.float32), exact, atol=0.05)


def test_unknown_architecture() -> None:
    with pytest.raises(ValueError, match=r"arch=resnet21 is unknown; known: resnet18, "):
        make_resnet("resnet21", num_classes=10)
