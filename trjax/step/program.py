"""A run's configuration turned into its parts: the one place from which `train` and `explain` take them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from trjax.config.run import Config
from trjax.data.augment import Preprocess, make_augment, normalise
from trjax.data.batches import Batch, count_batches
from trjax.data.sources import describe
from trjax.data.spec import DataSpec
from trjax.mesh import SPLIT, fill, machine_of, own_rows, place, split_batch
from trjax.models.chain import Chain, init_chain
from trjax.models.resnet import make_resnet
from trjax.step import collectives
from trjax.step.evaluation import make_evaluation
from trjax.step.layouts import StateLayouts, conv_order_of, make_layouts
from trjax.step.limits import check_size, count_examples
from trjax.step.optim import make_optimizer
from trjax.step.options import probe_options, train_step_options
from trjax.step.plan import NUM_SCORES, Plan
from trjax.step.reducers import Reducer, make_reducer
from trjax.step.run_plan import Shapes, plan_run
from trjax.step.spec import Accumulate, GradientPlan, ReduceTotals, StepSpec, TrainStep
from trjax.step.state import StateSpec, TrainState, init_state
from trjax.step.update import make_train_step, train_split
from trjax.step.zero import check_elementwise
from trjax.trees import select_leaves


@dataclass(frozen=True)
class Program:
    """The parts of a run; making one compiles and computes nothing.

    Attributes:
        mesh: the devices.
        spec: the train step of images as they are: model, plan, reduction, optimizer.
        layouts: of the state, as the step and as checkpoints have it, and where it lies.
        batch_shape: a `Batch` of shapes, as the step has it.
        eval_batch_shape: the same, as evaluation has it.
        totals_shape: of an evaluation's totals.
        num_steps: of the run.
        steps: train steps, jitted or compiled, by the side to which they resize the training images (0: none) and the
            number of steps in one call.
        accumulate: see `evaluation.make_evaluation`.
        reduce_totals: likewise.
    """

    mesh: Mesh
    spec: StepSpec
    layouts: StateLayouts
    batch_shape: Batch
    eval_batch_shape: Batch
    totals_shape: jax.ShapeDtypeStruct
    num_steps: int
    steps: Mapping[tuple[int, int], TrainStep]
    accumulate: Accumulate
    reduce_totals: ReduceTotals

    def init(self) -> TrainState:
        """Returns the initial state, on the devices."""
        return self.layouts.init()

    @property
    def train_step(self) -> TrainStep:
        """The train step for images as they are, one step a call."""
        return self.steps[0, 1]

    @property
    def gradients(self) -> GradientPlan:
        """How gradients are computed and summed: the model, its plan, the reduction."""
        return self.spec.gradients

    @property
    def plan(self) -> Plan:
        """Where the gradients lie."""
        return self.gradients.plan

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return self.spec.steps_per_epoch

    @property
    def rows(self) -> np.ndarray:
        """Positions, in a training batch, of the examples that this process reads."""
        return own_rows(self.mesh, self.batch_shape.labels.shape, train_split(self.gradients.micro_batches))

    @property
    def eval_rows(self) -> np.ndarray:
        """The same in a batch of an evaluation."""
        return own_rows(self.mesh, self.eval_batch_shape.labels.shape, SPLIT)

    def place(self, batch: Batch) -> Batch:
        """Splits a batch of an evaluation, of which this process has its rows, over the devices."""
        return jax.tree.map(partial(place, self.mesh, SPLIT), batch)

    def place_train(self, *batches: Batch) -> Batch:
        """Splits a training batch, or those of one call, over the devices; of micro-batches, each over all of them."""
        micro_batches = self.gradients.micro_batches
        if micro_batches > 1:
            batches = tuple(
                Batch(*(leaf.reshape(micro_batches, -1, *leaf.shape[1:]) for leaf in batch)) for batch in batches
            )
        stacked = batches[0] if len(batches) == 1 else Batch(*map(np.stack, zip(*batches, strict=True)))
        return jax.tree.map(partial(place, self.mesh, train_split(micro_batches, len(batches))), stacked)

    def votes(self, stop: bool) -> jax.Array:
        """Returns what this process's devices answer to: stop?"""
        return fill(self.mesh, (self.mesh.size,), float(stop))


def make_chain(config: Config, spec: DataSpec) -> Chain:
    """Returns the configured ResNet."""
    model = config.model
    return make_resnet(
        model.arch,
        num_classes=spec.num_classes,
        width=model.width or None,
        stem=None if model.stem == "default" else model.stem,
        dtype="float32" if config.precision == "tf32" else config.precision,
        exact=config.precision == "float32",
        reduce_moments=collectives.sum_moments if config.bn == "sync" else None,
        blur_pool=model.blur_pool,
        drop_path=model.drop_path,
        dropout=model.dropout,
    )


def make_prepare(config: Config, size: int = 0) -> Preprocess:
    """Returns the preprocessing of a run's training images, resized to this side; 0: as they are."""
    return make_augment(config.data, describe(config.data), config.seed, config.optim.label_smoothing, size)


def shape_run(config: Config, chain: Chain | None = None) -> Shapes:
    """Returns the shapes from which a run's plan is made; computes nothing."""
    spec = describe(config.data)
    chain = make_chain(config, spec) if chain is None else chain
    params, batch_stats = jax.eval_shape(lambda: init_chain(chain, jax.random.key(0), spec.image_shape))
    return Shapes(chain, params, batch_stats, spec.image_shape)


def shape_batch(spec: DataSpec, *dims: int) -> Batch:
    """Returns the shapes of a batch with these leading dims."""

    def shape(dtype: type[np.generic], *rest: int) -> Any:
        return jax.ShapeDtypeStruct((*dims, *rest), dtype)

    return Batch(shape(np.uint8, *spec.image_shape), shape(np.int32), shape(np.float32), shape(np.int32))


def _make_optimizers(
    config: Config, shapes: Shapes, plan: Plan, optimizer: optax.GradientTransformation | None, sharded: bool
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """Returns the optimizer of whole parameters, and that of the part that a device updates: often the same."""
    trained = select_leaves(shapes.params, plan.trained)
    if optimizer is not None:
        if sharded:
            check_elementwise(optimizer, trained)
        return optimizer, optimizer
    sums = (collectives.sum_norms,) if sharded else ()
    return make_optimizer(config.optim, trained), make_optimizer(config.optim, trained, *sums)


def _make_gradient_plan(config: Config, reducer: Reducer, chain: Chain, plan: Plan) -> GradientPlan:
    """Returns how the gradients of a run are computed and summed."""
    return GradientPlan(
        chain,
        plan,
        config.global_batch,
        reducer.launch,
        statistics="first" if config.bn == "rank0" else "mean",
        micro_batches=config.accumulate,
        sharded=reducer.sharded,
        remat=config.remat,
    )


def _train_dims(config: Config) -> tuple[int, ...]:
    """Returns the leading dims of a training batch: (global_batch,), or (micro_batches, examples of each)."""
    micro_batches = config.accumulate
    return (config.global_batch,) if micro_batches == 1 else (micro_batches, config.global_batch // micro_batches)


def _make_steps(config: Config, spec: StepSpec, mesh: Mesh, layouts: StateLayouts) -> dict[tuple[int, int], TrainStep]:
    """Returns the train steps of a run: one for each size of its images, and one of several steps a call."""
    resized = {size: replace(spec, augment=make_prepare(config, size)) for size in config.data.sizes}
    steps = {(size, 1): make_train_step(own, mesh, layouts) for size, own in {0: spec, **resized}.items()}
    if config.steps_per_dispatch > 1:
        steps[0, config.steps_per_dispatch] = make_train_step(spec, mesh, layouts, config.steps_per_dispatch)
    return steps


def make_program(
    config: Config, mesh: Mesh, chain: Chain | None = None, optimizer: optax.GradientTransformation | None = None
) -> Program:
    """Returns the parts of a run on a mesh.

    Args:
        config: the run.
        mesh: its devices.
        chain: a model of one's own in place of the configured ResNet.
        optimizer: one's own, for a learning rate of one, in place of the configured one.

    Raises:
        ValueError: the global batch is not divisible by the number of devices, `freeze` names no parameter, the
            optimizer cannot update shards, a device's examples do not mix in pairs, there are too few examples, or the
            run is too long or too large.
    """
    part = split_batch(config.global_batch, mesh.size, config.accumulate)
    if config.data.mixes and part % 2:
        raise ValueError(f"data.mixup or data.cutmix with {part} examples a device: must be even, to mix them in pairs")
    data, shapes, reducer = describe(config.data), shape_run(config, chain), make_reducer(config)
    steps_per_epoch = count_batches(count_examples(config, data), config.global_batch, config.last_batch)
    check_size(config, mesh, shapes.params, data, config.epochs * steps_per_epoch)
    machine, conv_order = machine_of(mesh, config.link_gbytes), conv_order_of(mesh.devices.flat[0].platform)
    plan = plan_run(config, shapes, machine, conv_order)
    whole_optimizer, optimizer = _make_optimizers(config, shapes, plan, optimizer, reducer.sharded)
    start = StateSpec(
        shapes.chain, data.image_shape, config.seed, config.optim.ema_decay > 0, config.precision == "float16"
    )
    init = partial(init_state, start, whole_optimizer, partial(select_leaves, names=plan.trained))
    layouts = make_layouts(mesh, plan, whole_optimizer, init, reducer.sharded)
    spec = StepSpec(
        gradients=_make_gradient_plan(config, reducer, shapes.chain, plan),
        optimizer=optimizer,
        augment=make_prepare(config),
        seed=config.seed,
        steps_per_epoch=steps_per_epoch,
        ema_decay=config.optim.ema_decay,
        written_out=reducer.written_out,
        options=train_step_options(config, reducer, plan, mesh),
    )
    options = probe_options(mesh, config.deterministic).accepted
    preprocess, formats = partial(normalise, spec=data), layouts.formats
    accumulate, reduce_totals = make_evaluation(shapes.chain, preprocess, mesh, formats, config.data.flip_test, options)
    return Program(
        mesh=mesh,
        spec=spec,
        layouts=layouts,
        batch_shape=shape_batch(data, *_train_dims(config)),
        eval_batch_shape=shape_batch(data, config.global_batch),
        totals_shape=jax.ShapeDtypeStruct((mesh.size, NUM_SCORES), np.float32),
        num_steps=config.epochs * steps_per_epoch,
        steps=_make_steps(config, spec, mesh, layouts),
        accumulate=accumulate,
        reduce_totals=reduce_totals,
    )
