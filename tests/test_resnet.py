from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trjax.keys import example_keys
from trjax.models.chain import init_chain
from trjax.models.pooling import blur
from trjax.models.resnet import ARCHITECTURES, Block, ConvNorm, Head, make_resnet
from trjax.trees import name_leaves

pytestmark = pytest.mark.fast

KEYS = example_keys(jax.random.key(5), jnp.arange(2))

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
    variables = block.init(jax.random.key(0), x, train=False, mask=mask, keys=KEYS)
    _, state = block.apply(
        variables, x, train=False, mask=mask, keys=KEYS, capture_intermediates=True, mutable=["intermediates"]
    )
    sizes = {
        name: value["__call__"][0].shape[1:] for name, value in state["intermediates"].items() if name != "__call__"
    }
    assert sizes == {"layer1": (8, 8, 4), "layer2": (4, 4, 4), "layer3": (4, 4, 16), "shortcut": (4, 4, 16)}


def test_a_fresh_block_is_the_identity_after_relu() -> None:
    """The last scale of every block starts at 0 (Goyal et al.); option A keeps every second pixel."""
    x, mask = jax.random.normal(jax.random.key(1), (2, 4, 4, 4)), jnp.ones(2)
    same = Block(4, 1, bottleneck=False, projection=False)
    y: Any = same.apply(
        same.init(jax.random.key(0), x, train=False, mask=mask, keys=KEYS), x, train=False, mask=mask, keys=KEYS
    )
    np.testing.assert_array_equal(y, jax.nn.relu(x))
    halved = Block(8, 2, bottleneck=False, projection=False)
    y = halved.apply(
        halved.init(jax.random.key(0), x, train=False, mask=mask, keys=KEYS), x, train=False, mask=mask, keys=KEYS
    )
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


def test_a_blurred_pixel_is_spread_as_worked_by_hand() -> None:
    """1 2 1 in both directions, over 16; at the edge the missing pixel is the edge itself."""
    spread = blur(jnp.zeros((1, 5, 5, 1)).at[0, 2, 2].set(16.0))[0, :, :, 0]
    np.testing.assert_array_equal(spread[1:4, 1:4], [[1, 2, 1], [2, 4, 2], [1, 2, 1]])
    assert float(spread.sum()) == 16
    corner = blur(jnp.zeros((1, 3, 3, 1)).at[0, 0, 0].set(16.0))[0, :2, :2, 0]
    np.testing.assert_array_equal(corner, [[9, 3], [3, 1]])
    np.testing.assert_array_equal(blur(jnp.ones((1, 1, 2, 3))), jnp.ones((1, 1, 2, 3)))


def test_blurred_nets_hardly_notice_a_shift() -> None:
    """Of a checkerboard a stride of two sees white or black, by where it begins; a blurred one sees grey."""
    board = (jnp.indices((8, 8)).sum(0) % 2).astype(jnp.float32)[None, :, :, None]
    changes = []
    for blurred in (False, True):
        block = make_resnet("resnet18", num_classes=10, width=4, blur_pool=blurred)["stage2_block1"]
        x = jnp.repeat(jnp.concatenate([board, 1 - board]), 4, axis=-1)
        given: Any = {"train": False, "mask": jnp.ones(2), "keys": KEYS}
        y: Any = block.apply(block.init(jax.random.key(0), x, **given), x, **given)
        first, second = y[:, 1:-1, 1:-1]
        changes.append(float(jnp.abs(first - second).max() / jnp.abs(first).max()))
    assert changes[0] > 10 * changes[1]


def test_paths_are_dropped_for_whole_examples_and_keep_their_mean() -> None:
    """The residual branch is 0 or twice itself at a rate of a half; outside of training nothing is drawn."""
    x, mask = jax.random.normal(jax.random.key(1), (256, 4, 4, 4)), jnp.ones(256)
    keys = example_keys(jax.random.key(2), jnp.arange(256))
    plain, dropping = (Block(4, 1, bottleneck=False, projection=False, drop_path=rate) for rate in (0.0, 0.5))
    variables = plain.init(jax.random.key(0), x, train=False, mask=mask, keys=keys)
    variables = jax.tree.map(lambda leaf: leaf + 0.5 if leaf.ndim == 1 else leaf, variables)
    x = x + 9  # the sum is positive, and relu leaves it alone

    def run(module: Block, train: bool) -> np.ndarray:
        y: Any = module.apply(variables, x, train=train, mask=mask, keys=keys, mutable=["batch_stats"])[0]
        return np.asarray(y - x)

    branch, drawn = run(plain, True), run(dropping, True)
    ratios = np.abs(drawn).sum((1, 2, 3)) / np.abs(branch).sum((1, 2, 3))
    kept = ratios > 1
    np.testing.assert_allclose(ratios, np.where(kept, 2, 0), atol=1e-3)
    assert 0.4 < kept.mean() < 0.6
    np.testing.assert_array_equal(run(dropping, False), run(plain, False))


def test_deeper_blocks_are_dropped_more() -> None:
    chain = make_resnet("resnet20", num_classes=10, drop_path=0.9)
    rates = [module.drop_path for module in chain.values() if isinstance(module, Block)]
    np.testing.assert_allclose(rates, np.arange(1, 10) / 10)


def test_dropout_draws_every_feature_of_every_example() -> None:
    x, keys = jnp.ones((64, 2, 2, 100)), example_keys(jax.random.key(2), jnp.arange(64))
    head = Head(1, dropout=0.25)
    variables = {"params": {"fc": {"kernel": jnp.ones((100, 1)), "bias": jnp.zeros(1)}}}
    logits: Any = head.apply(variables, x, train=True, mask=jnp.ones(64), keys=keys)
    counts = np.asarray(logits)[:, 0] * 0.75
    np.testing.assert_allclose(counts, counts.round(), atol=1e-3)  # features that were kept
    assert 70 < counts.mean() < 80
    assert len(np.unique(counts.round())) > 5
    still: Any = head.apply(variables, x, train=False, mask=jnp.ones(64), keys=keys)
    np.testing.assert_allclose(still, 100, rtol=1e-6)
