"""Image files: from files to what a network gets, whatever the files are; found once, read by any number of threads."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import one_block_chain, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from trjax.config.run import DataConfig
from trjax.data import folders, jpeg
from trjax.data.batches import epoch_order, eval_batches, train_batches
from trjax.data.folders import find_files, index_folder
from trjax.data.image_files import UNREADABLE
from trjax.data.images import MOST_RATIO, draw_box, example_random, open_image, read_for_evaluation, read_for_training
from trjax.data.jpeg import BadImageError, Jpeg, Rows
from trjax.data.pack import PackOptions, pack
from trjax.data.sources import class_names, describe, load, resolve
from trjax.run.fit import fit

SIZE = (8, 8)


def scene(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A smooth image, of which JPEG keeps nearly everything."""
    random = np.random.default_rng(seed)
    small = random.integers(60, 200, (3, 4, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def encode(pixels: np.ndarray, kind: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(
        file, kind, **({"quality": 95, "subsampling": 0} if kind == "JPEG" else {}), **options
    )
    return file.getvalue()


def decode(data: bytes) -> np.ndarray:
    return open_image(data).decode()


def write_folder(root: Path, per_class: int = 3, classes: tuple[str, ...] = ("ant", "bee")) -> Path:
    for split, count in (("train", per_class), ("val", 2)):
        for label, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                (folder / f"{index}.JPEG").write_bytes(encode(scene(20, 24, 100 * label + index)))
    return root


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trjax"


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn it by a quarter
    return encode(scene(20, 30), exif=exif)


def deep() -> bytes:
    file = io.BytesIO()
    Image.fromarray(scene(20, 30)[..., 0].astype(np.uint16) * 257).save(file, "PNG")
    return file.getvalue()


def animated() -> bytes:
    file = io.BytesIO()
    frames = [Image.fromarray(scene(20, 30, seed)) for seed in range(3)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "expected", "within"),
    [
        (encode(scene(20, 30)), scene(20, 30), 12),
        (encode(scene(20, 30), "PNG"), scene(20, 30), 0),
        (encode(scene(20, 30), "WEBP", lossless=True), scene(20, 30), 0),
        (encode(scene(20, 30), mode="L"), scene(20, 30).mean(-1, keepdims=True), 60),
        (encode(scene(20, 30), mode="CMYK"), scene(20, 30), 12),
        (encode(scene(20, 30), "PNG", "RGBA"), scene(20, 30), 0),
        (encode(scene(20, 30), "PNG", "P"), scene(20, 30), 60),
        (deep(), scene(20, 30)[..., :1], 0),
        (turned(), np.rot90(scene(20, 30), -1), 12),
        (animated(), scene(20, 30, 0), 60),
    ],
    ids=["jpeg", "png", "webp", "grey", "cmyk", "rgba", "palette", "16 bits", "turned", "animated"],
)
def test_every_kind_of_image_comes_as_rgb(data: bytes, expected: np.ndarray, within: int) -> None:
    pixels = decode(data)
    assert (pixels.dtype, pixels.shape) == (np.uint8, (*expected.shape[:2], 3))
    assert np.abs(pixels.astype(float) - expected).max() <= within
    assert read_for_evaluation(data, SIZE).shape == (*SIZE, 3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is empty"),
        (b"no image", "it is no image"),
        (encode(scene(200, 300))[:-400], "it is damaged"),
        (encode(scene(20, 30))[:60], "it is damaged|it is no image"),
        (encode(scene(200, 300), "PNG")[:-400], "it is damaged"),
        (b"\xff\xd8" + b"0" * 100 + b"\xff\xd9", "it is damaged|it is no image"),
    ],
)
def test_what_is_no_whole_image_is_refused(data: bytes, message: str) -> None:
    for read in (decode, lambda data: read_for_training(data, SIZE, example_random(0, 0, 0), 0.08)):
        with pytest.raises(BadImageError, match=message):
            read(data)


def test_an_image_that_claims_to_be_huge_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg, "MOST_PIXELS", 599)
    for kind in ("JPEG", "PNG"):
        with pytest.raises(BadImageError, match="it claims 30 x 20 pixels, more than 599"):
            open_image(encode(scene(20, 30), kind))


@given(st.integers(1, 60), st.integers(1, 60), st.floats(0.05, 1), st.integers(0, 10))
def test_boxes_lie_inside(height: int, width: int, least_area: float, index: int) -> None:
    top, left, own_height, own_width = draw_box(example_random(0, 0, index), height, width, least_area)
    assert 0 <= top <= top + own_height <= height
    assert 0 <= left <= left + own_width <= width
    assert min(own_height, own_width) > 0
    if min(height, width) > 30:
        assert own_height * own_width >= 0.9 * min(least_area, 0.5) * height * width
        assert own_width / own_height <= 1.1 * MOST_RATIO


def test_the_box_of_an_image_that_no_ratio_fits() -> None:
    assert draw_box(example_random(0, 0, 0), 10, 1000, 0.9) == (0, 493, 10, 13)  # 4/3 of its height, in the middle


def test_a_crop_is_the_same_at_any_scale_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large image is decoded at a quarter of its size; what comes is what its whole size would have given."""
    data = encode(scene(400, 600))
    seen = []
    decode_rows = Jpeg.decode_rows

    def spy(*arguments: Any) -> Rows:
        rows = decode_rows(*arguments)
        seen.append(rows.scale)
        return rows

    monkeypatch.setattr(Jpeg, "decode_rows", spy)
    for index in range(20):
        small = read_for_training(data, (32, 32), example_random(0, 0, index), 0.2)
        top, left, height, width = draw_box(example_random(0, 0, index), 400, 600, 0.2)
        box = (left, top, left + width, top + height)
        crop = Image.fromarray(scene(400, 600)).resize((32, 32), Image.Resampling.BOX, box)
        assert np.abs(small.astype(float) - np.asarray(crop)).mean() < 3
        assert min(height, width) * seen[-1] > 31
    assert set(seen) == {1 / 8, 1 / 4}


def test_an_evaluation_sees_the_middle() -> None:
    pixels = np.zeros((64, 96, 3), np.uint8)
    pixels[4:60, 20:76] = 200  # 0.875 of the shorter side
    np.testing.assert_array_equal(read_for_evaluation(encode(pixels, "PNG"), (8, 8)), 200)
    pixels[4:60, 20:76] = 0
    np.testing.assert_array_equal(read_for_evaluation(encode(255 - pixels, "PNG"), (8, 8)), 255)


def test_files_are_found_in_order_and_cached(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_folder(Path("data"))
    (root / "train" / "ant" / "Zürich ü.jpg").write_bytes(encode(scene(9, 9)))
    (root / "train" / "ant" / "notes.txt").touch()
    (root / "train" / "ant" / ".hidden.jpg").touch()
    (root / "train" / "bee" / "back").symlink_to("..")  # leads to all of them, and back to itself
    (root / "train" / "cow").mkdir()
    found = index_folder(root / "train")
    assert found.classes == ("ant", "bee", "cow")
    names = [found.name(index) for index in range(len(found))]
    assert names == [*(f"ant/{i}.JPEG" for i in range(3)), "ant/Zürich ü.jpg", *(f"bee/{i}.JPEG" for i in range(3))]
    assert found.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert found.read(3) == (encode(scene(9, 9)), 0)

    with monkeypatch.context() as patch:
        patch.setattr(folders, "_walk", lambda *_: pytest.fail("walked again"))
        again = index_folder(root / "train")
    assert (again.names, again.classes) == (found.names, found.classes)
    assert again.labels.tolist() == found.labels.tolist()
    (root / "train" / "cow" / "new.png").write_bytes(encode(scene(9, 9), "PNG"))
    assert len(index_folder(root / "train")) == 8
    (file,) = own_cache.glob("index-*.npz")
    file.write_bytes(file.read_bytes()[:-50])  # cut off
    assert len(index_folder(root / "train")) == 8
    own_cache.chmod(0o500)
    file.unlink(missing_ok=True)
    assert len(index_folder(root / "train")) == 8  # also where nothing can be remembered


def test_a_flat_folder_needs_a_file_of_its_classes(own_cache: Path) -> None:
    flat = Path("val")
    flat.mkdir()
    for index in range(3):
        (flat / f"{index}.JPEG").write_bytes(encode(scene(9, 9)))
    with pytest.raises(ValueError, match=r"outside of its classes' folders, 0.JPEG for one"):
        find_files(flat)
    Path("val_synsets.txt").write_text("n2\nn1\n\nn2\n")
    found, _ = find_files(flat)
    assert (found.classes, found.labels.tolist()) == (("n1", "n2"), [1, 0, 1])
    Path("val_synsets.txt").write_text("n2\nn1\n")
    with pytest.raises(ValueError, match=r"names 2 classes, and val holds 3 images"):
        find_files(flat)


def test_what_is_read_depends_on_seed_epoch_and_index_alone(own_cache: Path) -> None:
    write_folder(Path("data"), per_class=8)
    config = DataConfig(source="images", root="data", image_shape=(8, 8, 3), workers=3)
    source, test = load(config, seed=5)
    batches = list(train_batches(source, 6, 5, 0, 6))  # two epochs of three batches
    for step, batch in enumerate(batches):
        epoch, at = divmod(step, 3)
        np.testing.assert_array_equal(batch.indices[batch.mask > 0], epoch_order(5, epoch, 16)[6 * at : 6 * at + 6])
        for image, index in zip(batch.images[batch.mask > 0], batch.indices, strict=False):
            data, _ = source.files.read(int(index))  # type: ignore[attr-defined]
            expected = read_for_training(data, (8, 8), example_random(5, epoch, int(index)), 0.08)
            np.testing.assert_array_equal(image, expected)
    rest = list(train_batches(source, 6, 5, 4, 6))  # in the middle of an epoch
    for mine, theirs in zip(rest, batches[4:], strict=True):
        np.testing.assert_array_equal(mine.images, theirs.images)
    assert not np.array_equal(source.read(np.arange(4), 0)[0], source.read(np.arange(4), 1)[0])
    alone, _ = load(DataConfig(source="images", root="data", image_shape=(8, 8, 3), workers=1), seed=5)
    for mine, theirs in zip(train_batches(alone, 6, 5, 0, 3), batches, strict=False):
        np.testing.assert_array_equal(mine.images, theirs.images)
    (seen,) = eval_batches(test, 4)
    np.testing.assert_array_equal(seen.images[0], read_for_evaluation(encode(scene(20, 24, 0)), (8, 8)))


def test_what_is_packed_trains_as_its_files_do(own_cache: Path) -> None:
    root = write_folder(Path("data"), per_class=5)
    pack(root, Path("packed"), PackOptions(400, 90, 1.0, 1), lambda *_: None)
    shape = (8, 8, 3)
    here, there = (load(DataConfig(source="images", root=name, image_shape=shape)) for name in ("data", "packed"))
    for files, packed in zip(here, there, strict=True):
        for epoch in (0, None):
            for mine, theirs in zip(packed.read(np.arange(4), epoch), files.read(np.arange(4), epoch), strict=True):
                np.testing.assert_array_equal(mine, theirs)  # small enough to be kept as they are
    assert describe(DataConfig(source="images", root="packed")) == describe(DataConfig(source="images", root="data"))
    assert class_names(DataConfig(source="images", root="packed"), 2) == ("ant", "bee")
    Path("packed/train/index.json").rename("packed/train/unfinished.json")
    with pytest.raises(ValueError, match="its pack has not ended"):
        load(DataConfig(source="images", root="packed"))


def damage(root: Path) -> None:
    cut = encode(scene(200, 240))[:-900]
    for name, data in (("train/ant/1.JPEG", b""), ("train/bee/0.JPEG", cut), ("val/ant/0.JPEG", b"x")):
        (root / name).write_bytes(data)


def test_bad_images_are_left_out_and_named_once(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(write_folder(Path("data"), per_class=8))
    monkeypatch.setattr("trjax.step.program.make_chain", lambda config, spec: one_block_chain())
    data = DataConfig(source="images", root="data", image_shape=(8, 8, 3))
    assert load(data)[0].read(np.array([0, 1]), 0)[1].tolist() == [0, UNREADABLE]
    config = tiny_config(data=data, global_batch=8, epochs=3, devices="0-1", workdir="run")
    fit(config)
    said = capsys.readouterr().out
    assert said.count("warning: ") == 3
    assert "warning: ant/1.JPEG is left out" in said
    assert ": it is empty" in said
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [record["examples"] for record in records] == [14, 3] * 3  # of 16 and 4
    assert all(record["input_seconds"] > 0 for record in records if record["split"] == "train")
    text = Path("run/config.toml").read_text()
    assert "train_examples = 16" in text
    (Path("data") / "train" / "ant" / "more.jpg").write_bytes(encode(scene(9, 9)))
    with pytest.raises(ValueError, match=r"17, 4\] training and test examples, not \[16, 4\]|train_examples"):
        fit(tiny_config(data=data, global_batch=8, epochs=4, devices="0-1", workdir="run"))


def test_a_bad_image_may_stop_the_run(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(write_folder(Path("data"), per_class=8))
    monkeypatch.setattr("trjax.step.program.make_chain", lambda config, spec: one_block_chain())
    data = DataConfig(source="images", root="data", image_shape=(8, 8, 3), on_error="stop")
    with pytest.raises(
        ValueError, match=r"(ant/1|bee/0).JPEG: it is .*; mend or remove it, or pass --data.on-error skip"
    ):
        fit(tiny_config(data=data, global_batch=8, epochs=1, devices="0-1", workdir="run"))


def other_classes(root: Path) -> None:
    (root / "val" / "bee").rename(root / "val" / "cow")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda root: os.rename(root / "val", root / "else"), r"data.root=data: expected data/val/CLASS/\*.JPEG or"),
        (other_classes, "2 classes are in one split alone, bee for one"),
        (lambda root: [path.unlink() for path in root.glob("train/*/*")], "train holds no images"),
    ],
)
def test_folders_that_cannot_be_used(harm: Callable[[Path], Any], message: str, own_cache: Path) -> None:
    harm(write_folder(Path("data")))
    with pytest.raises(ValueError, match=message):
        describe(DataConfig(source="images", root="data"))
    with pytest.raises(ValueError, match="data.root='': must be the folder"):
        load(DataConfig(source="imagenet"))


def test_a_run_keeps_what_was_found(own_cache: Path) -> None:
    write_folder(Path("data"))
    found = resolve(DataConfig(source="images", root="data"))
    assert (found.num_classes, found.train_examples, found.test_examples) == (2, 6, 4)
    assert describe(found).image_shape == (224, 224, 3)
    assert resolve(DataConfig()) == DataConfig()
    spec = describe(DataConfig(source="imagenet"))  # to plan without it
    assert (spec.num_classes, spec.train_examples) == (1000, 1_281_167)
    with pytest.raises(ValueError, match="only data.source=synthetic takes all three; leave them out"):
        DataConfig(source="images", root="data", num_classes=3)


def test_a_file_of_arrays() -> None:
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "train_images": random.integers(0, 256, (6, 5, 4, 3), np.uint8), "train_labels": np.array([0, 1, 2, 0, 1, 2]),
        "test_images": random.integers(0, 256, (2, 5, 4, 3), np.uint8), "test_labels": np.array([2, 3]),
    }  # fmt: skip
    np.savez("a.npz", **arrays)
    config = DataConfig(source="npz", root="a.npz")
    spec = describe(config)
    assert (spec.image_shape, spec.num_classes, spec.train_examples, spec.test_examples) == ((5, 4, 3), 4, 6, 2)
    np.testing.assert_allclose(spec.std, (arrays["train_images"] / 255).std((0, 1, 2)), rtol=1e-3)
    train_source, test_source = load(config)
    np.testing.assert_array_equal(train_source.read(np.array([3]))[0], arrays["train_images"][3:4])
    np.testing.assert_array_equal(test_source.read(np.arange(2))[1], [2, 3])
    for name, array, message in (
        ("train_images", arrays["train_images"] / 255, r"train_images is float64\[6, 5, 4, 3\]; must be uint8"),
        ("test_labels", np.array([1]), r"test_labels is int64\[1\] for 2 images"),
        ("test_images", arrays["test_images"][:, 1:], r"training images are \(5, 4, 3\), test images \(4, 4, 3\)"),
    ):
        np.savez("b.npz", **arrays | {name: array})
        with pytest.raises(ValueError, match=message):
            describe(DataConfig(source="npz", root="b.npz"))
    np.savez("c.npz", train_images=arrays["train_images"])
    Path("d.npz").write_bytes(Path("a.npz").read_bytes()[:200])
    for name, message in (("c", "holds no array of this name"), ("d", "no file of arrays"), ("e", "no file of arrays")):
        with pytest.raises(ValueError, match=message):
            load(DataConfig(source="npz", root=f"{name}.npz"))
