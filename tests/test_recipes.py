"""Whole steps of whole recipes: the same at every world size, and their running means."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training.dynamic_scale import DynamicScale
from helpers import CIFAR_COUNT, DATA, one_block_chain, shrink_cifar, spread, tiny_config, write_cifar
from PIL import Image
from safetensors.numpy import load_file

from trjax.config.presets import preset_config
from trjax.config.run import Config, DataConfig, ModelConfig, OptimConfig
from trjax.data.augment import make_augment, normalise
from trjax.data.batches import Batch, eval_batches, train_batches
from trjax.data.sources import describe, load
from trjax.mesh import make_mesh
from trjax.models.chain import Chain, evaluate_chain
from trjax.models.resnet import make_resnet
from trjax.run.fit import fit
from trjax.step.collectives import sum_moments
from trjax.step.compile import lower_step
from trjax.step.evaluation import init_totals
from trjax.step.program import make_program
from trjax.step.state import FIRST_SCALE, GROWTH_STEPS, LARGEST_SCALE, next_loss_scale

EVERYTHING = tiny_config(
    data=replace(DATA, mixup=0.3, cutmix=1.0, flip=True, crop_padding=1),
    optim=OptimConfig(learning_rate=0.05, label_smoothing=0.1, ema_decay=0.9),
    model=ModelConfig(width=4, drop_path=0.5, dropout=0.2, blur_pool=True),
    bn="sync",
)


def chain_of(config: Config) -> Chain:
    """One block where the configured ResNet has three."""
    model = config.model
    whole = make_resnet(
        "resnet8", num_classes=10, width=4, reduce_moments=sum_moments,
        blur_pool=model.blur_pool, drop_path=model.drop_path, dropout=model.dropout,
    )  # fmt: skip
    return {"stem": whole["stem"], "block": whole["stage2_block1"], "head": whole["head"]}


def steps(config: Config, num_devices: int, num_steps: int = 3) -> tuple[list[Any], list[np.ndarray]]:
    """The states before and behind each step, on the host, and their outcomes."""
    program = make_program(config, make_mesh(f"0-{num_devices - 1}"), chain_of(config))
    state, outcomes = program.init(), []
    state = replace(state, params=jax.device_put(spread(state.params), program.layouts.formats.params))
    states = [jax.tree.map(np.asarray, state)]
    rates = np.full(program.num_steps, 0.05, np.float32)
    for batch in train_batches(load(config.data)[0], config.global_batch, 0, 0, num_steps):
        state, outcome = program.train_step(state, program.place_train(batch), rates, program.votes(False))
        states.append(jax.tree.map(np.asarray, state))
        outcomes.append(np.asarray(outcome))
    return states, outcomes


@pytest.mark.parametrize("accumulate", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_recipe_of_everything_is_the_same_at_every_world_size(accumulate: int) -> None:
    """Every draw is an example's own. Micro-batches normalise by themselves: another function, alike at each size."""
    config = replace(EVERYTHING, accumulate=accumulate)
    (one, alone), *others = [steps(config, num_devices) for num_devices in (1, 4)]
    for states, outcomes in others:
        np.testing.assert_allclose(outcomes, alone, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), states[-1], one[-1])
    (_, plain) = steps(replace(config, model=replace(config.model, drop_path=0.0)), 1)
    assert abs(plain[-1][0] - alone[-1][0]) > 1e-3  # something is dropped


def test_the_running_mean_equals_its_recurrence() -> None:
    """0.9, but (1 + n) / (10 + n) behind the first n updates; of the parameters and the statistics."""
    states, _ = steps(EVERYTHING, 2, 4)
    mean: Any = states[0].ema
    for updates, state in enumerate(states[1:]):
        share = min(0.9, (1 + updates) / (10 + updates))
        new = {"params": state.params, "batch_stats": state.batch_stats}
        mean = jax.tree.map(lambda old, new, share=share: share * old + (1 - share) * new, mean, new)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.ema, mean)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), states[-1].ema["params"], states[-1].params)
    assert max(jax.tree.leaves(moved)) > 1e-3


def test_a_step_that_is_not_finite_leaves_the_running_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(optim=OptimConfig(ema_decay=0.9))
    program = make_program(config, make_mesh("0-1"), one_block_chain())
    state = program.init()
    before = jax.tree.map(np.asarray, state.ema)
    params = jax.tree.map(lambda leaf: leaf * np.inf, state.params)
    (batch,) = train_batches(load(config.data)[0], 24, 0, 0, 1)
    state = replace(state, params=jax.device_put(params, program.layouts.formats.params))
    rates = np.full(program.num_steps, 0.05, np.float32)
    state, outcome = program.train_step(state, program.place_train(batch), rates, program.votes(False))
    assert outcome[-1] == 1
    jax.tree.map(np.testing.assert_array_equal, state.ema, before)


def test_the_running_mean_is_evaluated_saved_and_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trjax.step.program.make_chain", lambda config, spec: chain_of(config))
    fit(replace(EVERYTHING, workdir="whole", devices="0-1"))
    records = [json.loads(line) for line in Path("whole/metrics.jsonl").read_text().splitlines()]
    assert [record["split"] for record in records] == ["train", "test", "ema"] * 2
    assert all(record["examples"] == DATA.test_examples for record in records if record["split"] != "train")
    assert records[-1]["loss"] != records[-2]["loss"]


def test_mirror_images_are_evaluated_with_their_mean() -> None:
    config = tiny_config(data=replace(DATA, flip_test=True))
    program = make_program(config, make_mesh("0-1"), one_block_chain())
    state, source = program.init(), load(config.data)[1]
    params, batch_stats = spread(state.params), spread(state.batch_stats, 1)
    totals, expected = init_totals(program.mesh), np.zeros(2)
    for batch in eval_batches(source, config.global_batch):
        totals = program.accumulate(totals, params, batch_stats, program.place(batch))
        images = normalise(batch.images, describe(config.data))
        both = [
            evaluate_chain(program.gradients.chain, params, batch_stats, view) for view in (images, images[:, :, ::-1])
        ]
        logits = np.asarray((both[0] + both[1]) / 2, np.float64)[batch.mask > 0]
        labels = np.asarray(batch.labels)[batch.mask > 0]
        losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels]
        expected += [losses.sum(), (logits.argmax(1) == labels).sum()]
    found = np.asarray(program.reduce_totals(totals))
    np.testing.assert_allclose(found[:2], expected, rtol=1e-5)


def test_a_warm_up_longer_than_the_run_or_beyond_a_milestone_is_refused() -> None:
    config = tiny_config(optim=OptimConfig(warmup_steps=11))
    with pytest.raises(ValueError, match="optim.warmup_steps=11 with 10 steps in all"):
        make_program(config, make_mesh("0"), one_block_chain())
    config = tiny_config(optim=OptimConfig(warmup_steps=6, schedule="step", milestones=(1.0,)))
    with pytest.raises(ValueError, match="before its first milestone"):
        make_program(config, make_mesh("0"), one_block_chain())


def test_images_grow_and_each_size_compiles_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two epochs of 4x4, one of 6x6, two of 8x8; resumed, it goes on with the size of its epoch."""
    monkeypatch.setattr("trjax.step.program.make_chain", lambda config, spec: chain_of(config))
    data = replace(EVERYTHING.data, sizes=(4, 6), size_epochs=(2, 3))
    config = replace(EVERYTHING, data=data, epochs=5, workdir="run", devices="0-1")
    jax.config.update("jax_log_compiles", True)  # in all threads
    try:
        with caplog.at_level(logging.WARNING, logger="jax"):
            assert fit(config).finished
    finally:
        jax.config.update("jax_log_compiles", False)
    compiled = [record for record in caplog.records if "Compiling jit(update)" in record.getMessage()]
    assert len(compiled) == 3
    caplog.clear()
    assert fit(replace(config, epochs=6)).step == 30  # nothing of the smaller ones is compiled again
    program = make_program(config, make_mesh("0-1"), chain_of(config))
    texts = {size: lower_step(program, size).as_text() for size in (4, 6, 0)}
    for size, text in texts.items():
        assert f"x{size or 8}x{size or 8}x4xf32" in text  # behind the stem
    assert program.plan == make_program(EVERYTHING, make_mesh("0-1"), chain_of(EVERYTHING)).plan


def test_resized_images_are_those_of_pillow() -> None:
    """Halved: a triangle filter over four pixels."""
    config = DataConfig(source="synthetic", image_shape=(8, 8, 3))
    block = Batch(
        np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8), np.zeros(2, np.int32),
        np.ones(2, np.float32), np.arange(2, dtype=np.int32),
    )  # fmt: skip
    spec = describe(config)
    made = np.asarray(make_augment(config, spec, 0, 0.0, 4)(block, jnp.int32(0)).images)
    pixels = (made * np.array(spec.std) + np.array(spec.mean)) * 255
    for image, halved in zip(block.images, pixels, strict=True):
        expected = np.asarray(Image.fromarray(image).resize((4, 4), Image.Resampling.BILINEAR)).astype(float)
        assert np.abs(halved - expected).max() < 1


@pytest.mark.slow
def test_float16_trains_as_float32_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digits for two epochs: the same losses to a few per cent, and parameters and statistics in float32."""
    base = replace(preset_config("digits"), epochs=2, devices="0-1", global_batch=96, log_every=1000)
    base = replace(base, optim=replace(base.optim, warmup_epochs=1.0), model=replace(base.model, width=8))
    losses = {}
    for precision in ("float32", "float16"):
        assert fit(replace(base, precision=precision, workdir=precision)).finished
        records = [json.loads(line) for line in Path(precision, "metrics.jsonl").read_text().splitlines()]
        losses[precision] = [record["loss"] for record in records]
        assert all(record["skipped"] == 0 for record in records)
    np.testing.assert_allclose(losses["float16"], losses["float32"], rtol=0.03)
    (saved, *_) = [load_file(path) for path in Path("float16/checkpoints").glob("*.safetensors")]
    assert {leaf.dtype for leaf in saved.values()} == {np.dtype("float32"), np.dtype("int32")}
    assert saved[".loss_scale['scale']"] == FIRST_SCALE


def test_the_loss_scale_falls_with_an_overflow_and_grows_with_good_steps() -> None:
    scale: Any = {"scale": jnp.float32(8.0), "good_steps": jnp.int32(GROWTH_STEPS - 2)}
    path = []
    for finite in (True, True, True, False, False, False, False, False, False):
        scale = next_loss_scale(scale, jnp.bool_(finite))
        path.append((float(scale["scale"]), int(scale["good_steps"])))
    assert path == [(8, GROWTH_STEPS - 1), (16, 0), (16, 1), (8, 0), (4, 0), (2, 0), (1, 0), (1, 0), (1, 0)]
    large: Any = {"scale": jnp.float32(LARGEST_SCALE), "good_steps": jnp.int32(GROWTH_STEPS)}
    assert next_loss_scale(large, jnp.bool_(True))["scale"] == LARGEST_SCALE


def test_flax_knows_no_largest_loss_scale_and_takes_no_gradients_of_others() -> None:
    theirs = DynamicScale(growth_interval=1, fin_steps=1, scale=LARGEST_SCALE)
    grown, finite, _, _ = theirs.value_and_grad(lambda x: 0 * x)(jnp.float32(1))
    assert finite
    assert grown.scale == 2 * LARGEST_SCALE
    methods = {name for name, member in vars(DynamicScale).items() if callable(member) and not name.startswith("_")}
    assert methods <= {"value_and_grad", "replace"}


@pytest.mark.parametrize("reducer", ["two_group", pytest.param("zero1", marks=pytest.mark.slow)])
def test_a_scaled_loss_changes_no_update_and_an_overflow_only_the_scale(reducer: Any) -> None:
    """At any scale that fits, the parameters move alike; one that does not is halved, and nothing moves."""
    config = tiny_config(precision="float16", reducer=reducer)
    program = make_program(config, make_mesh("0-1"), one_block_chain(sum_moments, "float16"))
    (batch,) = train_batches(load(config.data)[0], 24, 0, 0, 1)
    rates, found = np.full(program.num_steps, 0.05, np.float32), {}
    for factor in (2.0**4, 2.0**10, 2.0**24 * 2.0**14):
        state = program.init()
        state = replace(state, loss_scale={**state.loss_scale, "scale": jax.device_put(
            np.float32(factor), program.layouts.formats.loss_scale["scale"])})  # fmt: skip
        before = jax.tree.map(np.asarray, state.params)
        state, outcome = program.train_step(state, program.place_train(batch), rates, program.votes(False))
        moved = jax.tree.map(lambda a, b: np.asarray(a) - b, state.params, before)
        found[factor] = (moved, float(outcome[-1]), float(state.loss_scale["scale"]) / factor)
    (small, *kept), (large, *also), (none, *halved) = found.values()
    assert (kept, also, halved) == ([0, 1], [0, 1], [1, 0.5])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), small, large)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(large)) > 1e-3
    assert not any(leaf.any() for leaf in jax.tree.leaves(none))


def test_only_float32_asks_for_all_digits_of_a_product() -> None:
    for precision, asked in (("float32", True), ("tf32", False), ("bfloat16", False)):
        text = lower_step(make_program(tiny_config(precision=precision), make_mesh("0"))).as_text()
        assert ("precision_config = [#stablehlo<precision HIGHEST>" in text) == asked


@pytest.mark.parametrize(
    "name",
    [
        "cifar10-resnet20",
        "cifar10-resnet18",
        "cifar10-resnet18-modern",
        pytest.param("cifar10-resnet56", marks=pytest.mark.slow),
    ],
)
def test_the_recipes_of_cifar_train_from_its_files(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller model, fewer examples and epochs; everything else is the preset's."""
    shrink_cifar(monkeypatch)
    write_cifar("cifar10", 0, Path("data"))
    preset = preset_config(name)
    spec = replace(describe(preset.data), train_examples=5 * CIFAR_COUNT, test_examples=CIFAR_COUNT)
    monkeypatch.setattr("trjax.data.sources._CIFAR10", spec)
    config = replace(
        preset, epochs=2, global_batch=8, devices="0-1", workdir="run", data=replace(preset.data, root="data"),
        model=replace(preset.model, arch="resnet8", stem="default", width=4),
        optim=replace(preset.optim, milestones=(1,) if preset.optim.milestones else (), warmup_epochs=0),
    )  # fmt: skip
    summary = fit(config)
    assert (summary.finished, summary.step) == (True, 2 * -(-5 * CIFAR_COUNT // 8))
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert all(0 < record["loss"] < 10 for record in records)
    splits = {"train", "test", "ema"} if preset.optim.ema_decay else {"train", "test"}
    assert {record["split"] for record in records} == splits
    assert records[-1]["examples"] == CIFAR_COUNT
