"""Images that are packed: all of them, in order, none larger than asked for; and what may go wrong meanwhile."""

import fcntl
import io
import json
import os
import pickle
import random
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
from filelock import FileLock
from PIL import Image

from trjax.data import pack as packing
from trjax.data.folders import Files, index_folder
from trjax.data.image_files import UNREADABLE, ImageFileSource
from trjax.data.images import open_image
from trjax.data.pack import PackOptions, pack, pack_split, shrink
from trjax.data.shards import BadImage, Shards, open_shards, read_index

HOW = PackOptions(max_side=64, quality=90, shard_mb=256, workers=2)
ONE_EACH = replace(HOW, shard_mb=1e-6)  # shards of one image
MOST_LOSS = 4.0  # mean difference of pixels that JPEG at 90 makes


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")


def draw(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Smooth pixels of one hue, as photographs have."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (4, 5), dtype=np.uint8)
    grey = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    return (grey[..., None] * generator.uniform(0.6, 1.0, 3)).astype(np.uint8)


def jpeg(width: int, height: int, seed: int = 0) -> bytes:
    return simplejpeg.encode_jpeg(draw(width, height, seed), 95)


def saved(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def put(path: str, data: bytes) -> bytes:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(data)
    return data


def put_many(count: int, classes: int = 2) -> None:
    for seed in range(count):
        put(f"src/train/class{seed % classes}/{seed:03}.jpg", jpeg(40, 30, seed))


def pixels_of(data: bytes) -> np.ndarray:
    return open_image(data).decode()


def packed(how: PackOptions = HOW, target: str = "dst") -> Shards:
    pack(Path("src"), Path(target), how)
    return open_shards(Path(target, "train"))


def contents(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


@pytest.mark.parametrize("how", [HOW, ONE_EACH, replace(HOW, shard_mb=0.004)], ids=["one shard", "one each", "some"])
def test_images_come_back_in_the_order_of_their_folder(how: PackOptions) -> None:
    names = ["b/2.jpg", "a/föhn.JPEG", "c/日本.jpg", "a/deep/er.jpg", os.fsdecode(b"c/caf\xe9.jpg"), "a/two\nlines.jpg"]
    small = {name: put(f"src/train/{name}", jpeg(64, 10 + seed, seed)) for seed, name in enumerate(names)}
    large = put("src/train/b/large.jpg", jpeg(300, 150, 9))
    flat = put("src/train/b/flat.png", saved(Image.fromarray(draw(20, 30)), "PNG"))
    files, images = index_folder(Path("src/train")), packed(how)
    assert images.classes == files.classes == ("a", "b", "c")
    assert len(images) == len(files) == 8
    for index in range(len(files)):
        name, (data, label) = files.name(index), images.read(index)
        assert (images.name(index), label) == (name, files.labels[index])
        if name in small:
            assert data == small[name]
    by_name = {images.name(index): images.read(index).data for index in range(len(images))}
    shrunk = cv2.resize(pixels_of(large), (64, 32), interpolation=cv2.INTER_AREA)
    for name, expected in (("b/large.jpg", shrunk), ("b/flat.png", pixels_of(flat))):
        assert simplejpeg.is_jpeg(by_name[name])
        assert pixels_of(by_name[name]).shape == expected.shape
        assert np.abs(pixels_of(by_name[name]).astype(int) - expected).mean() < MOST_LOSS
    least, most = {HOW: (1, 1), ONE_EACH: (8, 8)}.get(how, (2, 7))
    assert least <= len(images.shards) <= most


@pytest.mark.parametrize(
    ("size", "expected"),
    [((128, 64), (64, 32)), ((64, 65), (63, 64)), ((64, 64), (64, 64)), ((900, 3), (64, 1)), ((30, 4000), (1, 64))],
)
def test_the_longer_side_is_the_largest_that_is_allowed(size: tuple[int, int], expected: tuple[int, int]) -> None:
    for data in (jpeg(*size), saved(Image.new("RGB", size), "PNG")):
        height, width, colours, _ = simplejpeg.decode_jpeg_header(shrink(data, 64, 90))
        assert (width, height, colours) == (*expected, "YCbCr")


def test_quality_is_that_of_what_is_encoded_anew() -> None:
    data = jpeg(300, 200)
    assert len(shrink(data, 64, 50)) < len(shrink(data, 64, 90)) < len(shrink(data, 64, 99))


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned to the right
    return saved(Image.fromarray(draw(60, 40)), "JPEG", quality=95, exif=exif)


def deep() -> bytes:
    grey = draw(40, 30)[..., 0].astype(np.uint16) * 257
    return saved(Image.fromarray(grey), "PNG")


def palette() -> bytes:
    image = Image.new("P", (9, 7), 0)
    image.putpalette([10, 200, 30])
    return saved(image, "PNG")


KINDS: dict[str, tuple[bytes, np.ndarray]] = {
    "cmyk.jpg": (saved(Image.fromarray(draw(40, 30)).convert("CMYK"), "JPEG", quality=95), draw(40, 30)),
    "grey.jpg": (saved(Image.fromarray(draw(40, 30)[..., 0]), "JPEG", quality=95), draw(40, 30)[..., :1].repeat(3, 2)),
    "grey.png": (saved(Image.fromarray(draw(40, 30)[..., 0]), "PNG"), draw(40, 30)[..., :1].repeat(3, 2)),
    "deep.png": (deep(), draw(40, 30)[..., :1].repeat(3, 2)),
    "turned.jpg": (turned(), np.rot90(draw(60, 40), -1)),
    "palette.png": (palette(), np.full((7, 9, 3), (10, 200, 30))),
    "animated.gif": (
        saved(Image.new("L", (30, 20), 200), "GIF", save_all=True, append_images=[Image.new("L", (30, 20), 10)]),
        np.full((20, 30, 3), 200),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_all_kinds_of_images_become_plain_ones(name: str) -> None:
    data, expected = KINDS[name]
    put(f"src/train/a/{name}", data)
    images = packed()
    (stored, _), found = images.read(0), pixels_of(images.read(0).data)
    assert images.name(0) == f"a/{name}"
    assert simplejpeg.is_jpeg(stored)
    assert b"Exif" not in stored
    assert simplejpeg.decode_jpeg_header(stored)[2] in ("YCbCr", "Gray")
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).mean() < MOST_LOSS


def huge() -> bytes:
    data = bytearray(jpeg(40, 30))
    at = data.index(b"\xff\xc0") + 5  # behind the marker of a frame, its length, and the bits of a sample
    struct.pack_into(">HH", data, at, 10_000, 12_000)
    return bytes(data)


BAD = {
    "a/cut.jpg": (jpeg(40, 30)[:-200], "damaged"),
    "a/text.jpg": (b"<html>404</html>", "no image"),
    "a/zero.jpg": (b"", "empty"),
    "b/cut.png": (saved(Image.fromarray(draw(40, 30)), "PNG")[:-300], "damaged"),
    "b/huge.jpg": (huge(), "it claims 12000 x 10000 pixels"),
}


@pytest.mark.parametrize("how", [HOW, ONE_EACH], ids=["one shard", "one each"])
def test_damaged_images_are_left_out_and_named(how: PackOptions) -> None:
    for name, (data, _) in BAD.items():
        put(f"src/train/{name}", data)
    for name in ("a/good.jpg", "b/good.jpg", "b/other.jpg"):
        put(f"src/train/{name}", jpeg(40, 30))
    images, index = packed(how), read_index(Path("dst/train"))
    assert [images.name(at) for at in range(len(images))] == ["a/good.jpg", "b/good.jpg", "b/other.jpg"]
    assert [images.read(at).label for at in range(3)] == [0, 1, 1]
    assert (index.examples, index.class_examples) == (3, (1, 2))
    left_out = [left for shard in index.shards for left in shard.left_out]
    assert sorted(left.name for left in left_out) == sorted(BAD)
    for left in left_out:
        assert BAD[left.name][1] in left.reason


def test_a_split_of_damaged_images_alone_is_an_error() -> None:
    put("src/train/a/1.jpg", b"no")
    with pytest.raises(ValueError, match="src/train: none of its 1 images can be read"):
        packed()
    with pytest.raises(ValueError, match="has not ended"):
        open_shards(Path("dst/train"))


def test_all_splits_are_packed_the_flat_one_too() -> None:
    put("src/train/n1/1.jpg", jpeg(40, 30))
    put("src/train/n2/1.jpg", jpeg(40, 30))
    for name in ("1", "2"):
        put(f"src/val/{name}.jpg", jpeg(40, 30, int(name)))
    Path("src/val_synsets.txt").write_text("n2\nn1\n")
    assert list(pack(Path("src"), Path("dst"), HOW)) == ["train", "val"]
    val = open_shards(Path("dst/val"))
    assert [(val.name(at), val.classes[val.read(at).label]) for at in range(2)] == [("1.jpg", "n2"), ("2.jpg", "n1")]


def test_the_same_images_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    put_many(32, classes=8)
    packed(replace(HOW, shard_mb=0.01, workers=1), "one")
    monkeypatch.setattr(packing, "_AT_A_TIME", 3)
    packed(replace(HOW, shard_mb=0.01, workers=3), "two")
    assert len(contents("one/train")) > 3
    assert contents("one/train") == contents("two/train")


KILLED = """
import os, signal, sys
from pathlib import Path
from trjax.data import pack as packing

convert, first = packing._convert, {first}
def dying(files, how, index):
    if index == first:
        os.kill(os.getpid(), signal.SIGKILL)
    return convert(files, how, index)
packing._convert = dying
packing.pack(Path("src"), Path("dst"), packing.PackOptions(64, 90, {shard_mb}, 1))
"""


def test_a_killed_pack_resumes_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    put_many(20)
    how = replace(HOW, shard_mb=0.005, workers=1)
    whole = packed(how, "whole")
    first = sum(shard.records for shard in whole.shards[:2]) + 1  # the second image of the third shard
    ran = subprocess.run([sys.executable, "-c", KILLED.format(first=first, shard_mb=how.shard_mb)], timeout=60)
    assert ran.returncode == -signal.SIGKILL
    with pytest.raises(ValueError, match="dst/train: its pack has not ended; start .* again to resume"):
        open_shards(Path("dst/train"))
    converted, convert = [], packing._convert

    def noted(files: Files, how: PackOptions, index: int) -> bytes | BadImage:
        converted.append(index)
        return convert(files, how, index)

    monkeypatch.setattr(packing, "_convert", noted)
    packed(how)
    assert converted == list(range(first - 1, 20))  # the first two shards are not packed again
    assert contents("dst/train") == contents("whole/train")
    converted.clear()
    packed(how)
    assert not converted


FULL = """
import resource, sys
from trjax.data.__main__ import main

resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
sys.exit(main("pack src dst --shard-mb 0.15 --workers 1".split()))
"""


def test_a_full_disk_is_one_line_and_loses_nothing() -> None:
    for seed in range(8):  # the last four are large: they do not fit
        noise = np.random.default_rng(seed).integers(0, 256, (200, 200, 3), dtype=np.uint8)
        put(f"src/train/a/{seed}.jpg", jpeg(40, 30) if seed < 4 else simplejpeg.encode_jpeg(noise, 95))
    ran = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "dst/train/shard-0000" in ran.stderr
    assert "File too large; what is finished is kept: make room, and start again" in ran.stderr
    assert ran.stderr.count("\n") == 1
    kept = contents("dst/train")
    finished = [name for name in kept if name.endswith(".array_record")]
    assert finished
    assert not any(name.endswith(".partial") for name in kept)
    images = packed(PackOptions(400, 90, 0.15, 1))
    assert len(images) == 8
    assert len(images.shards) > len(finished)
    assert {name: contents("dst/train")[name] for name in finished} == {name: kept[name] for name in finished}


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "deleted": (lambda path: path.unlink(), "00001-of-0000.*: it is missing"),
    "truncated": (lambda path: os.truncate(path, 1000), r"00001-of-0000.*: it has 1,000 bytes, not \d\d"),
    "empty": (lambda path: path.write_bytes(b""), "00001-of-0000.*: it has 0 bytes"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_shard_is_named_and_packed_again(kind: str) -> None:
    put_many(20)
    how, (damage, message) = replace(HOW, shard_mb=0.005), DAMAGES[kind]
    images = packed(how)
    before = contents("dst/train")
    damage(Path("dst/train") / images.shards[1].file)
    with pytest.raises(ValueError, match=message):
        open_shards(Path("dst/train"))
    packed(how)
    assert contents("dst/train") == before


INDEX_DAMAGES: dict[str, tuple[Callable[[dict], object], str]] = {
    "format": (lambda table: table.update(format=99), "is of format 99; this version reads format 1"),
    "examples": (lambda table: table.update(examples=5), "is damaged .examples=5, with other numbers of them"),
    "shards": (lambda table: table["shards"].clear(), "is damaged"),
    "classes": (lambda table: table["classes"].append("x"), "is damaged .3 classes"),
    "type": (lambda table: table["shards"][0].update(records="4"), "is damaged .*records='4'"),
    "elsewhere": (lambda table: table["shards"][0].update(file="../x"), "is damaged .*file='../x'"),
    "missing": (lambda table: table.pop("about"), "is damaged .'about'"),
    "unknown": (lambda table: table["about"].update(new=1), "is damaged"),
}


@pytest.mark.parametrize("kind", INDEX_DAMAGES)
def test_a_damaged_index_is_reported(kind: str) -> None:
    put_many(4)
    packed()
    path = Path("dst/train/index.json")
    table = json.loads(path.read_text())
    INDEX_DAMAGES[kind][0](table)
    path.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=f"dst/train/index.json {INDEX_DAMAGES[kind][1]}"):
        open_shards(Path("dst/train"))


@pytest.mark.parametrize(("text", "message"), [("{", "is damaged"), ("[1]", "is damaged"), ("{}", "is damaged")])
def test_an_index_that_is_none_is_reported(text: str, message: str) -> None:
    put("dst/train/index.json", text.encode())
    with pytest.raises(ValueError, match=message):
        open_shards(Path("dst/train"))
    with pytest.raises(ValueError, match="x holds no packed images: index.json is missing"):
        open_shards(Path("x"))


def test_a_flipped_bit_costs_one_image() -> None:
    put_many(12)
    images = packed()
    path = Path("dst/train") / images.shards[0].file
    labels = [images.read(index).label for index in range(12)]
    content = bytearray(path.read_bytes())
    at = content.index(images.read(5).data) + 300
    content[at] ^= 1
    path.write_bytes(content)
    damaged = open_shards(Path("dst/train"))
    with pytest.raises(OSError, match="array_record, record 5: Corrupted .* mismatch$"):
        damaged.read(5)
    assert damaged.name(5) == f"{images.shards[0].file}[5]"
    source = ImageFileSource(damaged, (8, 8))
    assert source.read(np.arange(12))[1].tolist() == [*labels[:5], UNREADABLE, *labels[6:]]
    with pytest.raises(IndexError, match="image 12 of 12"):
        damaged.read(12)
    with pytest.raises(IndexError, match="image -1 of 12"):
        damaged.read(-1)


def test_a_shard_that_changed_under_the_same_name_is_reported_when_it_is_read() -> None:
    put_many(12)
    images = packed(replace(HOW, shard_mb=0.005))
    path = Path("dst/train") / images.shards[1].file
    path.write_bytes(bytes(path.stat().st_size))
    damaged = open_shards(Path("dst/train"))
    assert damaged.read(0) == images.read(0)
    with pytest.raises(OSError, match="00001-of-0000.*: 0 records can be read, not"):
        damaged.read(images.shards[0].records)
    path.unlink()
    with pytest.raises(OSError, match="0 records can be read"):
        damaged.read(images.shards[0].records)


def test_four_threads_read_what_one_does() -> None:
    put_many(40)
    images = packed(replace(HOW, shard_mb=0.01))
    assert len(images.shards) > 3
    expected = [images.read_named(index) for index in range(40)]
    assert len({data.data for _, data in expected}) == 40

    def read(seed: int) -> bool:
        order = [random.Random(seed).randrange(40) for _ in range(1500)]
        return all(fresh.read_named(index) == expected[index] for index in order)

    for fresh in (open_shards(Path("dst/train")), pickle.loads(pickle.dumps(images))):
        assert fresh == images
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read, range(4)))


def refused(source: str, target: str, how: PackOptions = HOW) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        pack(Path(source), Path(target), how)
    text = str(caught.value)
    assert text.isprintable()
    return text


def test_what_cannot_be_packed_is_reported_and_left_alone() -> None:
    put_many(2)
    put("other/notes.txt", b"mine")
    put("half/train/notes.txt", b"mine")
    Path("none").mkdir()
    Path("bare/train").mkdir(parents=True)
    assert "src/train/packed lies in src" in refused("src", "src/train/packed")
    assert "src lies in src" in refused("src", "src")
    assert "none holds none of the folders train, val, test" in refused("none", "dst")
    assert "nowhere holds none of the folders" in refused("nowhere", "dst")
    assert "train holds no images" in refused("bare", "dst")
    assert "other holds something else, notes.txt for one" in refused("src", "other")
    assert "half/train holds something else, notes.txt for one" in refused("src", "half")
    assert not Path("dst").exists()
    assert sorted(os.listdir("other")) == ["notes.txt"]
    assert sorted(os.listdir("half/train")) == ["notes.txt"]
    with pytest.raises(OSError, match="other/notes.txt"):
        pack(Path("src"), Path("other/notes.txt"), HOW)


@pytest.mark.parametrize("ended", [True, False])
def test_a_pack_of_something_else_is_not_resumed(ended: bool) -> None:
    put_many(6)
    packed(ONE_EACH)
    if not ended:
        Path("dst/train/index.json").rename("index.json")
        about = json.loads(Path("index.json").read_text())["about"]
        Path("dst/train/unfinished.json").write_text(json.dumps({"format": 1} | about))
    before = contents("dst/train")
    assert "was begun with max_side=64, not 32" in refused("src", "dst", replace(ONE_EACH, max_side=32))
    assert "was begun with quality=90, not 80" in refused("src", "dst", replace(ONE_EACH, quality=80))
    assert "was begun with shard_mb=1e-06, not 1.0" in refused("src", "dst", replace(ONE_EACH, shard_mb=1.0))
    put("src/train/class0/000.jpg", jpeg(40, 30, 99))  # the same name
    assert "dst/train holds images of another source" in refused("src", "dst", ONE_EACH)
    assert contents("dst/train") == before


def test_two_packs_do_not_write_the_same_files() -> None:
    put_many(2)
    Path("dst/train").mkdir(parents=True)
    descriptor = os.open("dst/train", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert refused("src", "dst") == "dst/train: another pack is at work there"
    os.close(descriptor)
    assert len(packed()) == 2


def test_filelock_locks_no_folder() -> None:
    Path("dst").mkdir()
    with pytest.raises(IsADirectoryError):
        FileLock("dst", blocking=False).acquire()


def test_progress_comes_to_all_images() -> None:
    put_many(9)
    reported: list[tuple[str, int, int]] = []
    pack_split(index_folder(Path("src/train")), Path("dst/train"), ONE_EACH, lambda *given: reported.append(given))
    assert reported == [("train", done, 9) for done in range(1, 10)]


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_side", 0), ("quality", 101), ("shard_mb", 0.0), ("shard_mb", float("nan")), ("workers", 0)],
)
def test_impossible_options(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option}={value}: must be "):
        PackOptions(**(asdict(HOW) | {option: value}))
