"""What is damaged is found, passed over, and left as it is."""

import hashlib
import os
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trjax.run.checkpoints import CheckpointInfo, Checkpoints, decode, encode
from trjax.step.state import TrainState

pytestmark = pytest.mark.fast


def state_of(step: int) -> TrainState:
    """Odd sizes, a minus zero, a NaN: bits that have to come back."""
    value = jnp.array([step, -0.0, jnp.nan], jnp.float32)
    params = {"a": {"kernel": jnp.full((3, 5), step, jnp.float32)}, "b": {"bias": value}}
    trace = jax.tree.map(lambda leaf: -leaf, params)
    return TrainState(params, {"a": {"mean": value[:1]}}, (trace, ()), jnp.int32(step), jnp.int32(1), {}, {})


def info(step: int, top1: float | None = None) -> CheckpointInfo:
    return CheckpointInfo(
        step, {"epoch": step // 10, "batch": step % 10}, {"seed": 3, "data": {"root": "ä"}}, top1, top1
    )


def save_all(folder: Path, *saved: CheckpointInfo) -> Checkpoints:
    checkpoints = Checkpoints(folder, pytest.fail)
    for one in saved:
        checkpoints.save(state_of(one.step), one)
    checkpoints.wait()
    return checkpoints


def opened(folder: Path) -> tuple[Checkpoints, list[str]]:
    warnings: list[str] = []
    return Checkpoints(folder, warnings.append), warnings


def same_bits(left: Any, right: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a).view("u1"), np.asarray(b).view("u1")), left, right
    )


def test_a_state_comes_back_to_the_bit(tmp_path: Path) -> None:
    save_all(tmp_path, info(10, 0.5))
    found, warnings = opened(tmp_path)
    assert (found.last, found.best, warnings) == (info(10, 0.5), info(10, 0.5), [])
    back = decode(found.read(10), jax.eval_shape(lambda: state_of(0)), "it")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(back)} == {"float32", "int32"}
    same_bits(jax.tree.leaves(back)[:-2], jax.tree.leaves(state_of(10))[:-2])
    assert (int(back.step), int(back.skipped)) == (10, 1)


def test_the_digest_is_one_that_other_tools_check(tmp_path: Path) -> None:
    save_all(tmp_path, info(10))
    line = (tmp_path / "10.safetensors.sha256").read_text()
    assert line == f"{hashlib.sha256((tmp_path / '10.safetensors').read_bytes()).hexdigest()}  10.safetensors\n"


def test_the_last_two_and_the_best_are_kept(tmp_path: Path) -> None:
    saved = [info(step, top1) for step, top1 in ((9, 0.5), (10, 0.9), (11, 0.9), (12, 0.2), (100, None), (101, 0.1))]
    checkpoints = save_all(tmp_path, *saved)
    assert sorted(checkpoints.found) == [11, 100, 101]
    assert checkpoints.best == info(11, 0.9)
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {f"{n}.safetensors" for n in (11, 100, 101)}
    found, _ = opened(tmp_path)
    assert (found.found, found.last) == (checkpoints.found, info(101, 0.1))


DAMAGES = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
    "one bit": lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:],
    "swapped": lambda data: data[:-8] + data[-4:] + data[-8:-4],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("end", ["", ".sha256"], ids=["state", "digest"])
def test_a_damaged_checkpoint_is_passed_over_and_left_alone(tmp_path: Path, damage: Any, end: str) -> None:
    save_all(tmp_path, info(10), info(20))
    path = tmp_path / f"20.safetensors{end}"
    path.write_bytes(damage(path.read_bytes()))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    found, warnings = opened(tmp_path)
    assert found.last == info(10)
    assert len(warnings) == 1
    assert str(tmp_path / "20.safetensors") in warnings[0]
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    # The run comes to that step again, and further: what was damaged is moved out of the way, never overwritten.
    for step in (20, 30, 40):
        found.save(state_of(step), info(step))
    found.wait()
    assert (tmp_path / "20.damaged1.safetensors").read_bytes() == before["20.safetensors"]
    assert opened(tmp_path)[0].found.keys() == {30, 40}


def test_a_thousand_damages_are_found(tmp_path: Path) -> None:
    """Flips, truncations and removals anywhere in either file: what is read is what was written, or the one before."""
    save_all(tmp_path, info(10), info(20))
    shapes = jax.eval_shape(lambda: state_of(0))
    whole = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    rng = random.Random(0)
    found_out = 0
    for _ in range(1000):
        name = rng.choice(["20.safetensors", "20.safetensors.sha256"])
        data, path = bytearray(whole[name]), tmp_path / name
        kind = rng.choice(["flip", "truncate", "remove"])
        if kind == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data[: rng.randrange(len(data))] if kind == "truncate" else data)
        if kind == "remove":
            path.unlink()
        found, warnings = opened(tmp_path)
        assert found.last == info(10)
        assert len(warnings) == (0 if kind == "remove" and name == "20.safetensors" else 1)
        assert int(decode(found.read(10), shapes, "it").step) == 10
        found_out += 1
        path.write_bytes(whole[name])
    assert found_out == 1000
    assert opened(tmp_path)[0].last == info(20)


def test_a_save_that_was_killed_is_named_and_harmless(tmp_path: Path) -> None:
    """Behind every write and rename of a save: the last checkpoint is there, or the one before it."""
    save_all(tmp_path, info(10))
    begun = encode(state_of(20), info(20))[:100]
    (tmp_path / "20.safetensors.partial").write_bytes(begun)
    (tmp_path / "20.safetensors.sha256").write_text("0  20.safetensors\n")
    found, (warning,) = opened(tmp_path)
    assert found.last == info(10)
    assert "20.safetensors.partial is skipped: it was not written to its end" in warning
    found.save(state_of(20), info(20))
    found.wait()
    again, warnings = opened(tmp_path)
    assert (again.last, warnings) == (info(20), [])
    assert (tmp_path / "20.damaged1.safetensors").read_bytes() == begun


def test_a_full_disk_is_an_error_and_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = save_all(tmp_path, info(10))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        checkpoints.save(state_of(20), info(20))
        with pytest.raises(OSError, match="No space left"):
            checkpoints.wait()
    found, warnings = opened(tmp_path)
    assert (found.last, warnings) == (info(10), [])


def test_another_model_is_told_by_what_differs() -> None:
    shapes = jax.eval_shape(lambda: state_of(0))
    other = encode(
        TrainState({"a": {"kernel": jnp.zeros((3, 4))}, "c": {}}, {}, (), jnp.int32(0), jnp.int32(0), {}, {}), info(0)
    )
    message = (
        r"it is of another model or optimizer: .batch_stats\['a'\]\['mean'\] is missing; "
        r".*kernel'\] is missing; .*; .params\['a'\]\['kernel'\] is float32\[3, 4\] there and float32\[3, 5\] here"
    )
    with pytest.raises(ValueError, match=message):
        decode(other, shapes, "it")
    with pytest.raises(ValueError, match="it is no checkpoint"):
        decode(b"nothing", shapes, "it")


def test_saving_reads_a_copy(tmp_path: Path) -> None:
    """The state is overwritten by the next step, its donee, before the writer has come to it."""
    checkpoints = Checkpoints(tmp_path, pytest.fail)
    state = state_of(10)
    checkpoints.save(state, info(10))
    overwrite = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0 + 7, state), donate_argnums=0)
    jax.block_until_ready(overwrite(state))
    checkpoints.wait()
    back = decode(checkpoints.read(10), jax.eval_shape(lambda: state_of(0)), "it")
    assert float(back.params["a"]["kernel"][0, 0]) == 10
