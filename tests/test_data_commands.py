"""`python -m trjax.data` and `trjax.preview`: what they say of folders, what they fetch, what they draw."""

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urljoin

import jax
import numpy as np
import pooch
import pytest
from PIL import Image

from trjax import preview
from trjax.config.run import Config, DataConfig
from trjax.data import cifar, download, pack
from trjax.data.__main__ import main
from trjax.data.batches import Batch, epoch_order
from trjax.data.folders import Files
from trjax.data.shards import BadImage, open_shards
from trjax.data.sources import describe, load
from trjax.step.program import make_prepare

CONTENT = bytes(np.random.default_rng(0).integers(0, 256, 1_000_000, dtype=np.uint8))
FILE = Path("dst/cifar-10-python.tar.gz")
PARTIAL = Path("dst/cifar-10-python.tar.gz.partial")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")


def put_flat(path: str, size: tuple[int, int], *colours: tuple[int, int, int]) -> None:
    """An image of stripes, each of one colour."""
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    for number, colour in enumerate(colours):
        pixels[:, number * size[0] // len(colours) :] = colour
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code, and what was said; a mistake is one line."""
    code = main(arguments)
    said = capsys.readouterr()
    assert (said.err == "") == (code != 2)
    assert said.err.count("\n") == (code == 2)
    return code, said.out + said.err


def put_splits() -> None:
    for name in ("train/a/1.png", "train/a/2.png", "train/b/1.png", "val/a/1.png"):
        put_flat(f"src/{name}", (40, 30), (255, 0, 0), (0, 0, 255))


def test_pack_says_what_it_packed_and_what_not(capsys: pytest.CaptureFixture[str]) -> None:
    put_splits()
    Path("src/train/b/bad\n.jpg").write_bytes(b"no")
    code, said = run(capsys, "pack", "src", "dst", "--max-side", "20", "--quality", "80")
    first, second, third = said.splitlines()
    assert code == 0
    assert first == r"left out: 'b/bad\n.jpg': it is no image"
    assert second.startswith("dst/train: 3 images of 2 classes in 1 shards, ")
    assert second.endswith(" MB; 1 left out")
    assert third.startswith("dst/val: 1 images of 1 classes in 1 shards, ")
    assert Image.open(io.BytesIO(open_shards(Path("dst/train")).read(0).data)).size == (20, 15)


def test_ctrl_c_is_one_line_and_keeps_what_is_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_splits()
    convert = pack._convert

    def stopped(files: Files, how: pack.PackOptions, index: int) -> bytes | BadImage:
        if index == 2:
            raise KeyboardInterrupt
        return convert(files, how, index)

    with monkeypatch.context() as patched:
        patched.setattr(pack, "_convert", stopped)
        assert main(["pack", "src", "dst", "--shard-mb", "1e-6"]) == 130
    assert capsys.readouterr().err.startswith("stopped; started again, pack and download resume")
    names = {path.name for path in Path("dst/train").glob("*.array_record*")}
    assert names == {f"shard-0000{at}-of-00003.array_record{end}" for at in (0, 1) for end in ("", ".json")}
    assert run(capsys, "pack", "src", "dst", "--shard-mb", "1e-6")[0] == 0


@pytest.mark.parametrize("kind", ["files", "packed"])
def test_verify_finds_nothing_where_all_is_well(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    put_splits()
    run(capsys, "pack", "src", "dst")
    damaged = "0 images damaged" if kind == "files" else "0 shards and 0 images damaged"
    folder = "src" if kind == "files" else "dst"
    assert run(capsys, "verify", folder) == (0, f"train: 3 images; {damaged}\nval: 1 images; {damaged}\n")
    assert run(capsys, "verify", f"{folder}/val", "--workers", "1") == (0, f"val: 1 images; {damaged}\n")


def test_verify_names_damaged_files(capsys: pytest.CaptureFixture[str]) -> None:
    put_splits()
    os.truncate("src/train/a/2.png", 60)
    Path("src/val/a/0.jpg").write_bytes(b"")
    code, said = run(capsys, "verify", "src")
    lines = said.splitlines()
    assert code == 1
    assert lines[0].startswith("train: a/2.png: it is damaged: ")
    assert lines[1:] == [
        "train: 3 images; 1 images damaged",
        "val: a/0.jpg: it is empty",
        "val: 2 images; 1 images damaged",
    ]


def test_verify_names_damaged_shards_and_reads_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(5):
        put_flat(f"src/train/a/{seed}.png", (40, 30), (seed * 50, 0, 0))
    Path("src/train/a/5.png").write_bytes(b"no")
    run(capsys, "pack", "src", "dst", "--shard-mb", "1e-6")
    shards = sorted(Path("dst/train").glob("*.array_record"))
    images = open_shards(Path("dst/train"))
    content = bytearray(shards[1].read_bytes())
    content[content.index(images.read(1).data) + 400] ^= 1
    shards[1].write_bytes(content)
    shards[0].unlink()
    os.truncate(shards[4], 100)
    code, said = run(capsys, "verify", "dst")
    lines = said.splitlines()
    assert code == 1
    assert [line.split(": ")[1] for line in lines[:3]] == [shards[at].name for at in (0, 1, 4)]
    assert "it is missing" in lines[0]
    assert "its bytes have changed since it was packed" in lines[1]
    assert "it has 100 bytes" in lines[2]
    assert f"{shards[1].name}[0]: dst/train/{shards[1].name}, record 0: Corrupted" in lines[3]
    assert lines[4:] == [
        "train: 5 images; 3 shards and 1 images damaged; 1 were left out when it was packed",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "nowhere"], "nowhere is not a folder"),
        (["stats", "empty"], "empty holds no images"),
        (["stats", "src", "--most", "0"], "most=0: must be positive"),
        (["pack", "src", "dst", "--quality", "0"], "quality=0: must be from 1 to 100"),
        (["pack", "empty", "dst"], "empty holds none of the folders train, val"),
        (["verify", "begun"], "begun: its pack has not ended"),
        (["stats", "begun"], "begun: its pack has not ended"),
        (["download", "cifar10", "dst", "--mirror", "file:///etc/passwd"], "mirror='file:///etc/passwd': must begin"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    put_splits()
    Path("empty").mkdir()
    Path("begun").mkdir()
    Path("begun/unfinished.json").write_text("{}")
    code, said = run(capsys, *arguments)
    assert code == 2
    assert message in said


def test_stats_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    put_flat("src/train/a/1.png", (40, 30), (255, 0, 51))  # 1, 0 and 0.2 of red, green and blue
    put_flat("src/train/a/2.png", (20, 80), (0, 0, 51))
    put_flat("src/train/a/3.png", (60, 10), (255, 0, 51), (0, 0, 51))
    put_flat("src/train/b/1.png", (10, 10), (255, 0, 51), (0, 0, 51))
    Path("src/train/c").mkdir()
    Path("src/train/c/1.png").write_bytes(b"no")
    assert run(capsys, "stats", "src/train") == (
        0,
        "train: 5 images of 3 classes; 5 of them looked at\n"
        "                   min  median  max\n"
        "images of a class    1       1    3\n"
        "width               10      30   60\n"
        "height              10      20   80\n"
        "mean of red, green, blue in [0, 1]: 0.5000, 0.0000, 0.2000\n"
        "std of red, green, blue in [0, 1]: 0.5000, 0.0000, 0.0000\n"
        "1 damaged:\n"
        "  c/1.png: it is no image\n",
    )
    _, said = run(capsys, "stats", "src", "--most", "2")  # the first and the third
    assert "5 images of 3 classes; 2 of them looked at" in said
    assert "width               40      50   60" in said


def test_stats_of_what_is_packed(capsys: pytest.CaptureFixture[str]) -> None:
    put_splits()
    run(capsys, "pack", "src", "dst", "--max-side", "20")
    _, said = run(capsys, "stats", "dst")
    train, val = said.split("\n\n")
    assert "train: 3 images of 2 classes; 3 of them looked at" in train
    assert "images of a class    1     1.5    2" in train
    assert "height              15      15   15" in val


@dataclass
class Site:
    """A server of one file.

    Attributes:
        content: of the file.
        ranges: it can send a part.
        shift: of the part that it sends.
        cuts: after how many bytes each of the next answers breaks off.
        asked: what it was asked for: path, and range.
        url: of its folder.
    """

    content: bytes = CONTENT
    ranges: bool = True
    shift: int = 0
    cuts: list[int] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            wanted = self.headers.get("Range", "")
            site.asked.append((self.path, wanted))
            if not self.path.endswith("cifar-10-python.tar.gz"):
                self.send_error(404)
                return
            start = 0
            if wanted and site.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-")) + site.shift
            if start >= len(site.content):
                self.send_error(416)
                return
            self.send_response(206 if wanted and site.ranges else 200)
            if wanted and site.ranges:
                self.send_header("Content-Range", f"bytes {start}-{len(site.content) - 1}/{len(site.content)}")
            self.send_header("Content-Length", str(len(site.content) - start))
            self.end_headers()
            self.wfile.write(site.content[start:][: site.cuts.pop(0) if site.cuts else None])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    site.url = f"http://127.0.0.1:{server.server_port}/"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def _small_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive is small, and published nowhere."""
    monkeypatch.setattr(download, "ARCHIVES", {"cifar10": (FILE.name, hashlib.md5(CONTENT).hexdigest())})
    monkeypatch.setattr(download, "HOME", "http://127.0.0.1:9/page.html")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


REAL = dict(download.ARCHIVES)


def test_the_archives_are_those_that_are_read() -> None:
    for name, (file, _) in REAL.items():
        assert file == cifar._LAYOUTS[name][0].archive
        assert urljoin(cifar.HOME, file) == f"https://www.cs.toronto.edu/~kriz/{file}"
    assert {md5 for _, md5 in REAL.values()} == {
        "c58f30108f718f92721af3b95e74349a",
        "eb9058c3a382ffc7106e4002c42a8d85",
    }


def test_download_asks_mirrors_in_turn_and_only_once(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Site()) as site:
        code, said = run(capsys, "download", "cifar10", "dst", "--mirror", f"{site.url}nothing", f"{site.url}there/")
        assert (code, FILE.read_bytes()) == (0, CONTENT)
        assert f"{FILE}: 1,000,000 bytes from {site.url}there/{FILE.name}" in said
        assert site.asked == [("/nothing", ""), (f"/there/{FILE.name}", "")]
        assert run(capsys, "download", "cifar10", "dst")[1] == f"{FILE} is there already, and whole\n"
        assert len(site.asked) == 2
    assert os.listdir("dst") == [FILE.name]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_that_was_cut_off_is_resumed(ranges: bool) -> None:
    Path("dst").mkdir()
    PARTIAL.write_bytes(CONTENT[:300_000])
    with serving(Site(ranges=ranges)) as site:
        reported: list[int] = []
        download.download("cifar10", Path("dst"), [site.url], lambda _, done, total: reported.append(done))
        assert FILE.read_bytes() == CONTENT
        assert site.asked == [(f"/{FILE.name}", "bytes=300000-")]
        assert (min(reported) > 300_000) == ranges
        assert max(reported) == 1_000_000


def test_another_part_than_the_one_that_was_asked_for_is_not_taken() -> None:
    Path("dst").mkdir()
    PARTIAL.write_bytes(CONTENT[:300_000])
    message = "it sends 'bytes 299000-999999/1000000' for the bytes from 300000 on"
    with serving(Site(shift=-1000)) as site, pytest.raises(ValueError, match=message):
        download.download("cifar10", Path("dst"), [site.url])
    assert PARTIAL.read_bytes() == CONTENT[:300_000]


def test_a_connection_that_breaks_is_made_again() -> None:
    with serving(Site(cuts=[400_000, 300_000])) as site:
        download.download("cifar10", Path("dst"), [site.url])
        assert [wanted for _, wanted in site.asked] == ["", "bytes=400000-", "bytes=700000-"]
    assert FILE.read_bytes() == CONTENT


def test_pooch_starts_again_from_the_first_byte() -> None:
    with serving(Site(cuts=[400_000])) as site:
        fetch = partial(pooch.retrieve, f"{site.url}{FILE.name}", f"md5:{hashlib.md5(CONTENT).hexdigest()}", FILE.name)
        with pytest.raises(IOError, match="IncompleteRead"):
            fetch("dst")
        assert os.listdir("dst") == []
        fetch("dst")
        assert [wanted for _, wanted in site.asked] == ["", ""]


def test_a_server_that_always_breaks_off_is_given_up_and_what_came_is_kept() -> None:
    with (
        serving(Site(cuts=[400_000, 0, 0])) as site,
        pytest.raises(ValueError, match="cut off after 400,000") as caught,
    ):
        download.download("cifar10", Path("dst"), [site.url])
    assert len(site.asked) == 2
    assert f"400,000 bytes are kept in {PARTIAL} for the next try" in str(caught.value)
    assert os.listdir("dst") == [PARTIAL.name]
    assert PARTIAL.read_bytes() == CONTENT[:400_000]


@pytest.mark.parametrize("begun", [b"", b"other bytes"])
def test_a_wrong_file_never_has_the_name(begun: bytes) -> None:
    Path("dst").mkdir()
    if begun:
        PARTIAL.write_bytes(begun)
    wrong = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    with serving(Site(wrong)) as site, pytest.raises(ValueError, match="its MD5 is [0-9a-f]{32}, not ") as caught:
        download.download("cifar10", Path("dst"), [site.url])
    assert str(caught.value).isprintable()
    assert len(site.asked) == (2 if begun else 1)  # what lay there may have been to blame
    assert os.listdir("dst") == []


def test_other_bytes_at_the_beginning_cost_a_second_try_and_wrong_mirrors_the_next() -> None:
    Path("dst").mkdir()
    PARTIAL.write_bytes(b"other bytes")
    with serving(Site(b"<html>")) as wrong, serving(Site()) as site:
        download.download("cifar10", Path("dst"), [wrong.url, site.url])
    assert FILE.read_bytes() == CONTENT
    assert os.listdir("dst") == [FILE.name]


def test_all_bytes_under_the_other_name_are_not_fetched_again() -> None:
    Path("dst").mkdir()
    PARTIAL.write_bytes(CONTENT)
    with serving(Site()) as site:
        download.download("cifar10", Path("dst"), [site.url])
        assert site.asked == [(f"/{FILE.name}", "bytes=1000000-")]
    assert FILE.read_bytes() == CONTENT


def test_a_damaged_file_is_set_aside() -> None:
    Path("dst").mkdir()
    FILE.write_bytes(CONTENT[:-1])
    with serving(Site()) as site:
        download.download("cifar10", Path("dst"), [site.url])
    assert FILE.read_bytes() == CONTENT
    assert FILE.with_name(f"{FILE.name}.damaged").read_bytes() == CONTENT[:-1]


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Site()) as site:
        pass
    code, said = run(capsys, "download", "cifar10", "dst", "--mirror", site.url)
    assert code == 2
    assert f"{FILE.name} could not be had: {site.url}{FILE.name}: " in said
    assert "refused" in said


def sheet_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> np.ndarray:
    assert preview.main([*arguments, "--out", "sheet.png"]) == 0
    assert "sheet.png: " in capsys.readouterr().out
    return np.asarray(Image.open("sheet.png"))


def tile(sheet: np.ndarray, index: int, columns: int, side: int, scale: int) -> np.ndarray:
    """One image of a sheet, in its own size."""
    across, down = side * scale + 4, side * scale + 14 + 4
    left, top = 4 + index % columns * across, 4 + index // columns * down
    shown = sheet[top : top + side * scale, left : left + side * scale]
    np.testing.assert_array_equal(shown, shown[::scale, ::scale].repeat(scale, 0).repeat(scale, 1))
    return shown[::scale, ::scale]


def test_a_preview_without_augmentation_is_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    sheet = sheet_of(capsys, "--preset", "digits", "--data.crop-padding", "0", "--count", "7", "--epoch", "3")
    images, _ = load(DataConfig(source="digits"))[0].read(epoch_order(0, 2, 1437)[:7])
    for index in range(7):
        np.testing.assert_array_equal(tile(sheet, index, 3, 8, 12), images[index].repeat(3, -1))
    assert sheet.shape == (3 * (96 + 18) + 4, 3 * (96 + 4) + 4, 3)


def test_a_preview_shows_what_the_network_gets(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data.source", "synthetic", "--data.train-examples", "64", "--data.mixup", "0.5", "--seed", "3"]
    sheet = sheet_of(
        capsys, *options, "--data.crop-padding", "4", "--data.flip", "--count", "5", "--global-batch", "64"
    )
    data = DataConfig(source="synthetic", train_examples=64, mixup=0.5, crop_padding=4, flip=True)
    order = epoch_order(3, 0, 64).astype(np.int32)
    batch = Batch(*load(data)[0].read(order), np.ones(64, np.float32), order)
    inputs = jax.jit(make_prepare(Config(data=data, seed=3, global_batch=64)))(batch, np.int32(0))
    spec = describe(data)
    expected = np.asarray(inputs.images) * np.array(spec.std) + np.array(spec.mean)
    for index in range(5):  # as in the whole batch
        shown = tile(sheet, index, 3, 32, 3).astype(int)
        assert np.abs(shown - expected[index].clip(0, 1) * 255).max() <= 0.51  # rounded
    assert np.abs(expected[:5] * 255 - batch.images[:5]).max() > 50


def test_a_preview_grows_with_the_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data.sizes", "4", "--data.size-epochs", "2", "--epochs", "40", "--count", "2"]
    assert preview.main([*arguments, "--epoch", "2", "--out", "sheet.png"]) == 0
    assert "2 training images of 4x4, epoch 2" in capsys.readouterr().out
    assert preview.main([*arguments, "--epoch", "3", "--out", "sheet.png"]) == 0
    assert "2 training images of 8x8, epoch 3" in capsys.readouterr().out


def test_captions_name_classes_and_shares() -> None:
    names = ["cat", "dog", "fox"]
    assert preview._caption(np.array([0.0, 1.0, 0.0]), names) == "dog"
    assert preview._caption(np.array([0.3, 0.0, 0.7]), names) == "fox 70% cat 30%"
    assert preview._caption(np.zeros(3), names) == "(unreadable)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--count", "0"], "count=0: must be from 1 to 10000"),
        (["--epoch", "0"], "epoch=0: must be positive"),
        (["--out", "sheet.jpg"], "out=sheet.jpg: its ending must be .png"),
        (["--out", "no/sheet.png"], "no/sheet.png: its folder does not exist"),
        (["--preset", "cifar10-resnet20"], "data.source=cifar10 needs --data.root"),
        (["--data.source", "synthetic", "--data.image-shape", "8", "8", "2"], "images of 2 channels cannot be shown"),
    ],
)
def test_preview_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert preview.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(Path().glob("*.png*"))
