"""Damaged, odd and hostile files of CIFAR: what was written comes back, or an error that names the file."""

import gzip
import io
import os
import pickle
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import CIFAR_COUNT, attempt, make_cifar_rows, pack_cifar, shrink_cifar, write_cifar
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trjax.data import cifar

ARCHIVES = ("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_cifar(monkeypatch)


def same(examples: Any, parts: list[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Whether what was loaded is what was written: all pixels and labels."""
    images, labels = (np.concatenate([half[index] for half in examples]) for index in (0, 1))
    rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.array_equal(rows, np.concatenate([pixels for pixels, _ in parts])) and np.array_equal(
        labels, np.concatenate([labels for _, labels in parts])
    )


def load_bytes(name: str, content: bytes) -> tuple[Any, str]:
    Path("packed").mkdir(exist_ok=True)
    Path("packed", name).write_bytes(content)
    return attempt(lambda: cifar.load_cifar("cifar10", "packed"))


def flip(content: bytes, bit: int) -> bytes:
    damaged = bytearray(content)
    damaged[bit // 8 % len(content)] ^= 1 << bit % 8
    return bytes(damaged)


@settings(max_examples=40)
@given(version=st.sampled_from([0, 1]), bit=st.integers(0, 2**40), cut=st.integers(0, 2**40))
@example(version=0, bit=3 * 8 + 1, cut=10)  # the header says: a checksum of the header follows
@example(version=1, bit=4 * 8, cut=17)  # another time of packing, which is nothing to us
def test_no_flipped_bit_of_an_archive_goes_unnoticed(version: int, bit: int, cut: int) -> None:
    if not Path(f"made{version}").exists():
        pack_cifar(write_cifar("cifar10", version, Path(f"made{version}"))[0], Path(ARCHIVES[version]))
    content = Path(ARCHIVES[version]).read_bytes()
    parts = [make_cifar_rows("cifar10", seed) for seed in range(6)]
    assert same(load_bytes(ARCHIVES[version], content)[0], parts)
    examples, problem = load_bytes(ARCHIVES[version], flip(content, bit))
    assert same(examples, parts) if examples else ARCHIVES[version] in problem
    examples, problem = load_bytes(ARCHIVES[version], content[: cut % len(content)])
    assert examples is None
    assert ARCHIVES[version] in problem
    Path("packed", ARCHIVES[version]).unlink()


def test_a_flipped_pixel_is_found_by_the_checksum(tmp_path: Path) -> None:
    folder, parts = write_cifar("cifar10", 1, tmp_path / "made")
    with tarfile.open("stored.tar.gz", "w:gz", compresslevel=0) as file:  # stored: nothing else would notice
        file.add(folder, folder.name)
    content = Path("stored.tar.gz").read_bytes()
    assert same(load_bytes(ARCHIVES[1], content)[0], parts)
    pixels = content.index(parts[5][0][5, 100:200].tobytes())  # of the last file
    _, problem = load_bytes(ARCHIVES[1], flip(content, 8 * pixels))
    assert "cifar-10-binary.tar.gz is damaged (CRC check failed" in problem


@settings(max_examples=60)
@given(
    version=st.sampled_from([0, 1]), ends=st.booleans(), bits=st.lists(st.integers(0, 2**40), min_size=1, max_size=3)
)
def test_a_damaged_file_of_a_folder_has_the_right_form_or_is_named(version: int, ends: bool, bits: list[int]) -> None:
    root = Path(f"made{version}")
    folder = root / cifar._LAYOUTS["cifar10"][version].folder
    if not root.exists():
        write_cifar("cifar10", version, root)
    file = folder / cifar._LAYOUTS["cifar10"][version].train[2][0]
    content = damaged = file.read_bytes()
    for bit in bits:  # at the ends lies what holds the pixels together
        damaged = flip(damaged, bit % 4800 - 2400 if ends else bit)
    file.write_bytes(damaged)
    examples, problem = attempt(lambda: cifar.load_cifar("cifar10", str(root)))
    file.write_bytes(content)
    if examples is None:
        assert f"{file.name} is damaged" in problem
    else:
        (images, labels), _ = examples
        assert images.shape == (5 * CIFAR_COUNT, 32, 32, 3)
        assert set(labels) <= set(range(10))
        rows = images.transpose(0, 3, 1, 2).reshape(5, CIFAR_COUNT, -1)
        assert np.array_equal(rows[[0, 1, 3, 4]], [make_cifar_rows("cifar10", seed)[0] for seed in (0, 1, 3, 4)])


def member(kind: str, content: bytes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo("cifar-10-batches-py/data_batch_2")
    info.size = len(content)
    if kind in ("symbolic link", "hard link"):
        info.type = tarfile.SYMTYPE if kind == "symbolic link" else tarfile.LNKTYPE
        info.linkname = "data_batch_1" if kind == "symbolic link" else "cifar-10-batches-py/data_batch_1"
    elif kind == "link away":
        info.type, info.linkname = tarfile.SYMTYPE, str(Path("away").absolute())
    elif kind in ("pipe", "device", "folder"):
        info.type = {"pipe": tarfile.FIFOTYPE, "device": tarfile.CHRTYPE, "folder": tarfile.DIRTYPE}[kind]
    elif kind in ("absolute", "parent"):
        info.name = f"{Path.cwd()}/owned" if kind == "absolute" else f"cifar-10-batches-py/../../{info.name}"
    elif kind == "zeros":
        content = bytes(1_000_000)
        info.size = len(content)
    if not info.isreg():
        info.size, content = 0, b""
    return info, content


@pytest.mark.parametrize(
    "kind",
    [
        "symbolic link",
        "hard link",
        "link away",
        "pipe",
        "device",
        "folder",
        "absolute",
        "parent",
        "zeros",
        "none",
        "good",
    ],
)
def test_odd_members_are_not_followed(kind: str, tmp_path: Path) -> None:
    folder, parts = write_cifar("cifar10", 0, tmp_path / "made")
    (tmp_path / "away").write_bytes((folder / "data_batch_2").read_bytes())
    before = set(tmp_path.rglob("*"))
    with tarfile.open(tmp_path / ARCHIVES[0], "w:gz") as file:
        for path in sorted(folder.iterdir()):
            if path.name != "data_batch_2":
                file.add(path, f"{folder.name}/{path.name}")
            elif kind != "none":
                info, content = member(kind, path.read_bytes())
                file.addfile(info, io.BytesIO(content))
    examples, problem = attempt(lambda: cifar.load_cifar("cifar10", str(tmp_path)))
    assert same(examples, parts) if kind == "good" else "data_batch_2 is " in problem
    assert set(tmp_path.rglob("*")) == {*before, tmp_path / ARCHIVES[0]}


def test_what_unpacks_to_more_than_there_can_be_is_not_unpacked() -> None:
    _, problem = load_bytes(ARCHIVES[0], gzip.compress(bytes(20_000_000)))
    assert "cifar-10-python.tar.gz is damaged (it holds more than 1" in problem
    folder, _ = write_cifar("cifar10", 0, Path("made"))
    with (folder / "data_batch_4").open("ab") as file:
        file.truncate(2**40)  # takes no room on the disk
    _, problem = attempt(lambda: cifar.load_cifar("cifar10", "made"))
    assert "data_batch_4 is damaged (it holds more than" in problem


def test_a_member_before_its_own_start_does_not_loop() -> None:
    info = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = (-(2**9) * 2).to_bytes(12, "big", signed=True)
    header[148:156] = b"%06o\0 " % (256 + sum(header[:148]) + sum(header[156:512]))
    _, problem = load_bytes(ARCHIVES[0], bytes(header))
    assert "is damaged (a member of -1024 bytes)" in problem


@given(st.text("abcdefgh._", min_size=1), st.text("abcdefgh._", min_size=1))
@example("os", "system")
@example("builtins", "eval")
@example("numpy", "load")
@example("numpy.core.multiarray", "fromfile")
@example("_codecs", "decode")
def test_a_pickle_names_nothing_but_arrays(module: str, name: str) -> None:
    content = b"\x80\x02c%s\n%s\nX\x05\0\0\0owned\x85R." % (module.encode(), name.encode())
    with pytest.raises(pickle.UnpicklingError, match="it names '"):
        cifar._unpickle(content)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}r\0\0\0\x01.",  # numbers an object 2^24
        b"}p16777216\n.",
        b"\x80\x02cnumpy\nndarray\n(J\0\0\0\x01tX\x01\0\0\0O\x86R.",  # an array of 2^24 objects
    ],
)
def test_a_pickle_takes_no_more_memory_than_its_size(content: bytes) -> None:
    tracemalloc.start()
    with pytest.raises((pickle.UnpicklingError, TypeError), match="numbers an object|not subscriptable"):
        cifar._decode(content, cifar._LAYOUTS["cifar10"][0])
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1_000_000


def test_pickles_of_python_2_are_read() -> None:
    """As published: byte strings, and numpy's old names."""
    pixels, labels = make_cifar_rows("cifar10", 0)
    raw = pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0tU\x01btR(K\x01K%cM\0\x0c\x86"
        b"cnumpy\ndtype\n(U\x02u1K\0K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89T%stb"
    ) % (CIFAR_COUNT, len(raw).to_bytes(4, "little") + raw)
    listed = b"](" + b"".join(b"K%c" % label for label in labels) + b"e"
    read, found = cifar._decode(b"\x80\x02}(U\x04data%sU\x06labels%su." % (array, listed), cifar._LAYOUTS["cifar10"][0])
    np.testing.assert_array_equal(read, pixels)
    np.testing.assert_array_equal(found, labels)


@pytest.mark.parametrize(
    "labels",
    [[1.0] * CIFAR_COUNT, [True] * CIFAR_COUNT, [[1]] * CIFAR_COUNT, "x" * CIFAR_COUNT, [2**70] * CIFAR_COUNT, None],
)
def test_labels_are_integers(labels: Any) -> None:
    folder, _ = write_cifar("cifar10", 0, Path("made"))
    pixels, _ = make_cifar_rows("cifar10", 0)
    (folder / "data_batch_1").write_bytes(pickle.dumps({b"data": pixels, b"labels": labels}, protocol=2))
    with pytest.raises(ValueError, match="data_batch_1 is damaged .*labels are not"):
        cifar.load_cifar("cifar10", "made")


@pytest.mark.parametrize("kind", ["pipe", "folder"])
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_no_file_is_not_waited_for(kind: str, packed: bool) -> None:
    folder, _ = write_cifar("cifar10", 0, Path("made"))
    path = Path("made", ARCHIVES[0]) if packed else folder / "data_batch_2"
    if packed:
        folder.rename("elsewhere")
    else:
        path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with pytest.raises(ValueError, match=rf"{path.name} is .*not a regular file"):
        cifar.load_cifar("cifar10", "made")
