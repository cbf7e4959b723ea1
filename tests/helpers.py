"""What several test modules share: small configurations, batches, and gradients of one kind or another."""

import pickle
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trjax.config.command_line import parse_options
from trjax.config.run import Config, DataConfig, ModelConfig, OptimConfig
from trjax.data import cifar
from trjax.data.batches import Batch, Inputs
from trjax.mesh import make_mesh
from trjax.models.batchnorm import BatchNorm
from trjax.models.chain import Chain, apply_chain, segment_keys
from trjax.models.resnet import Block, Head, StemSegment
from trjax.step import collectives
from trjax.step.buckets import Grouping, two_groups
from trjax.step.collectives import sum_moments
from trjax.step.layouts import make_layouts
from trjax.step.options import probe_options
from trjax.step.plan import PlanSpec, make_plan
from trjax.step.program import Program, make_program
from trjax.step.scores import score
from trjax.step.spec import GradientPlan, StepSpec
from trjax.step.state import TrainState
from trjax.step.update import make_train_step
from trjax.trees import name_leaves, select_leaves

WRITTEN_OUT = ("ring", "tree", "parameter_server")  # the same bits on all devices, but `shard_map` cannot see it
DATA = DataConfig(source="synthetic", image_shape=(8, 8, 3), train_examples=100, test_examples=50)


def attempt(do: Callable[[], Any]) -> tuple[Any, str]:
    """What comes back, or the text of the ValueError in its place, which must be one line."""
    try:
        return do(), ""
    except ValueError as error:
        text = str(error)
    assert text.isprintable()
    return None, text


@dataclass(frozen=True)
class NoOptions:
    """A command without options of its own."""


def parse_config(arguments: Sequence[str]) -> Config:
    """The configuration that a command line asks for."""
    return parse_options(arguments, "prog", "Do.", NoOptions())[0]


def tiny_config(**changes: Any) -> Config:
    """A ResNet-8 of width 4 on 8x8 noise, global batch 24: divisible by 1, 2, 3, 4 and 8."""
    return replace(
        Config(global_batch=24, epochs=2, data=DATA, model=ModelConfig(width=4), optim=OptimConfig(learning_rate=0.05)),
        **changes,
    )


def one_block_chain(reduce_moments: Any = None, dtype: str = "float32") -> Chain:
    """The smallest chain with every kind of region; compiles in a second or two."""
    shared: dict[str, Any] = {"reduce_moments": reduce_moments, "dtype": jnp.dtype(dtype)}
    return {
        "stem": StemSegment(4, "cifar", **shared),
        "block": Block(8, 2, bottleneck=False, projection=True, **shared),
        "head": Head(10),
    }


class Dense(nn.Module):
    """A segment of a model that is no ResNet."""

    features: int
    relu: bool = True
    norm: Literal["none", "local", "sync"] = "none"

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array, keys: jax.Array) -> jax.Array:
        y = nn.Dense(self.features)(x.reshape(x.shape[0], -1))
        if self.norm != "none":
            reduce_moments = sum_moments if self.norm == "sync" else None
            y = BatchNorm(reduce_moments=reduce_moments, name="norm")(y, train=train, mask=mask)
        return nn.relu(y) if self.relu else y


def dense_chain(norm: Literal["none", "local", "sync"] = "none") -> Chain:
    """A chain of odd sizes, none of them divisible by 2, 3, 4 or 8; compiles in a second."""
    return {"first": Dense(7), "middle": Dense(5, norm=norm), "more": Dense(11), "last": Dense(10, relu=False)}


@cache
def tiny_program(num_devices: int, **changes: Any) -> Program:
    config = tiny_config(**changes)
    chain = one_block_chain(sum_moments if config.bn == "sync" else None, config.precision)
    return make_program(config, make_mesh(f"0-{num_devices - 1}"), chain)


def spread(tree: Any, seed: int = 0) -> Any:
    """Moves every vector off its initial value, so that no residual branch is multiplied by zero."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: leaf + (random.uniform(0.2, 0.6, leaf.shape).astype(np.float32) if leaf.ndim == 1 else 0), tree
    )


def noise_block(seed: int, size: int, shape: tuple[int, ...] = (8, 8, 3), num_classes: int = 10) -> Any:
    """Images, labels and a full mask."""
    random = np.random.default_rng(seed)
    images = random.normal(size=(size, *shape)).astype(np.float32)
    return images, random.integers(0, num_classes, size, dtype=np.int32), np.ones(size, np.float32)


def capture_gradients() -> optax.GradientTransformation:
    """Keeps the gradients of a step as its state, and changes no parameter."""
    zeros = partial(jax.tree.map, jnp.zeros_like)
    return optax.GradientTransformation(zeros, lambda gradients, _state, params: (zeros(params), gradients))


def assert_same_bits(tree: Any) -> None:
    """All devices hold the same bits of arrays that are whole on each of them."""
    for leaf in jax.tree.leaves(tree):
        first, *others = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        for other in others if first.shape == leaf.shape else ():
            np.testing.assert_array_equal(other, first)


def reduced_on(
    num_devices: int,
    chain: Chain,
    params: Any,
    batch_stats: Any,
    block: Any,
    split: Grouping = two_groups,
    *,
    hosts: int = 1,
    planned: Any = MappingProxyType({}),
    **options: Any,
) -> dict[str, np.ndarray]:
    """What a train step sums on that many devices, by region name; all devices hold the same bits."""
    mesh = make_mesh(f"0-{num_devices - 1}", hosts)
    plan = make_plan(params, batch_stats, tuple(chain), PlanSpec(split, "HWIO", **planned))
    how = GradientPlan(chain, plan, len(block[1]), **{"launch": collectives.all_reduce, **options})
    optimizer = capture_gradients()
    spec = StepSpec(
        how,
        optimizer,
        lambda micro, _epoch: Inputs(micro.images),
        seed=0,
        steps_per_epoch=1,
        written_out=how.launch.__name__ in WRITTEN_OUT,
        options=probe_options(mesh).accepted,
    )
    zero = jnp.zeros((), jnp.int32)
    opt_state = optimizer.init(select_leaves(params, plan.trained))
    start = jax.tree.map(jnp.asarray, TrainState(params, batch_stats, opt_state, zero, zero, {}, {}))
    layouts = make_layouts(mesh, plan, optimizer, lambda: start, how.sharded)
    images, labels, mask = block
    batch = Batch(images, labels, mask, labels)
    if how.micro_batches > 1:
        batch = jax.tree.map(lambda leaf: leaf.reshape(how.micro_batches, -1, *leaf.shape[1:]), batch)
    step = make_train_step(spec, mesh, layouts)
    state, outcome = step(layouts.init(), batch, np.zeros(1, np.float32), np.zeros(num_devices, np.float32))
    assert_same_bits((state, outcome))
    whole = layouts.unload(state)
    found = name_leaves(whole.opt_state) | name_leaves(whole.batch_stats) | {"results": outcome[:-1]}
    return {name: np.asarray(leaf) for name, leaf in found.items()}


@partial(jax.jit, static_argnums=0)
def _plain_gradients(segments: Any, params: Any, batch_stats: Any, images: Any, labels: Any, mask: Any) -> Any:
    def loss(params: Any) -> tuple[jax.Array, Any]:
        chain = dict(segments)
        keys = segment_keys(chain, jax.random.key(0), labels)
        x, stats = apply_chain(chain, params, images, batch_stats=batch_stats, train=True, mask=mask, keys=keys)
        return score(x, labels, mask)[0] / mask.sum(), stats

    return jax.grad(loss, has_aux=True)(params)


def plain_gradients(chain: Chain, params: Any, batch_stats: Any, block: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gradients of the mean loss and new statistics of one block, by one `jax.grad` and without a mesh."""
    gradients, stats = _plain_gradients(tuple(chain.items()), params, batch_stats, *block)
    return name_leaves(gradients), name_leaves(stats)


def relative_error(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    """Length of the difference over the length of `expected`, all leaves taken as one vector."""
    assert actual.keys() >= expected.keys()
    squares = [np.sum((np.float64(actual[name]) - np.float64(leaf)) ** 2) for name, leaf in expected.items()]
    return float((sum(squares) / sum(np.sum(np.float64(leaf) ** 2) for leaf in expected.values())) ** 0.5)


def worst_kind_error(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    """The most of `relative_error` over kernels, scales, biases, means and variances, each kind by itself."""
    kinds = {name.rpartition("/")[2] for name in expected}
    parts = ({name: leaf for name, leaf in expected.items() if name.endswith(f"/{kind}")} for kind in kinds)
    return max(relative_error(actual, part) for part in parts)


CIFAR_COUNT = 6


def shrink_cifar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has CIFAR's files hold a few examples each; in every other way they are as published."""

    def shrink(files: Any) -> Any:
        return tuple((name, CIFAR_COUNT) for name, _ in files)

    small = {
        name: tuple(replace(layout, train=shrink(layout.train), test=shrink(layout.test)) for layout in layouts)
        for name, layouts in cifar._LAYOUTS.items()
    }
    monkeypatch.setattr(cifar, "_LAYOUTS", small)


def make_cifar_rows(name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (CIFAR_COUNT, 3072), dtype=np.uint8), random.integers(
        0, 10 if name == "cifar10" else 100, CIFAR_COUNT
    )


def write_cifar(name: str, version: int, root: Path) -> tuple[Path, list[tuple[np.ndarray, np.ndarray]]]:
    """Writes the extracted folder of the python (0) or binary (1) version."""
    layout = cifar._LAYOUTS[name][version]
    folder = root / layout.folder
    folder.mkdir(parents=True)
    parts = []
    for seed, (file, _) in enumerate(layout.train + layout.test):
        pixels, labels = make_cifar_rows(name, seed)
        parts.append((pixels, labels))
        if version == 0:
            content = pickle.dumps(
                {b"data": pixels, layout.label_key: labels.tolist(), b"batch_label": b"x"}, protocol=2
            )
        else:
            coarse = np.zeros((CIFAR_COUNT, layout.label_bytes - 1), np.uint8)
            content = np.concatenate([coarse, labels[:, None].astype(np.uint8), pixels], 1).tobytes()
        (folder / file).write_bytes(content)
    return folder, parts


def pack_cifar(folder: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, folder.name)


# Two streams of one GPU, in picoseconds from the line's start: a kernel and an AllReduce that overlap, outside of any
# graph, then two kernels of a graph, one of them NCCL's. The line with operations repeats what the streams hold.
GPU_PROFILE = """
planes {
  name: "/device:GPU:0"
  lines { id: 1 name: "Stream #7(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 4000000 stats { metadata_id: 1 str_value: "fusion.1" } }
    events { metadata_id: 1 offset_ps: 9000000 duration_ps: 1000000 stats { metadata_id: 2 uint64_value: 5 } } }
  lines { id: 2 name: "Stream #8(Compute)" timestamp_ns: 1000
    events { metadata_id: 2 offset_ps: 3000000 duration_ps: 3000000
      stats { metadata_id: 1 str_value: "all-reduce-start.1" } }
    events { metadata_id: 2 offset_ps: 12000000 duration_ps: 2000000 stats { metadata_id: 2 uint64_value: 5 } } }
  lines { id: 3 name: "XLA Ops" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 14000000 stats { metadata_id: 1 str_value: "fusion.1" } } }
  event_metadata { key: 1 value { id: 1 name: "loop_fusion" } }
  event_metadata { key: 2 value { id: 2 name: "ncclDevKernel_AllReduce_Sum_f32_RING_LL" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "cuda_graph_id" } }
}
planes {
  name: "/host:CPU"
  lines { id: 1 name: "python" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 1 } events { metadata_id: 2 offset_ps: 1 duration_ps: 1 }
    events { metadata_id: 1 offset_ps: 2 duration_ps: 1 } events { metadata_id: 3 offset_ps: 0 duration_ps: 3000 } }
  event_metadata { key: 1 value { id: 1 name: "cuGraphLaunch (CudaGraph:5)" } }
  event_metadata { key: 2 value { id: 2 name: "command_buffer::update" } }
  event_metadata { key: 3 value { id: 3 name: "trjax: input" } }
}
"""
