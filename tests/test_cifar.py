import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trjax.config import DataConfig
from trjax.data import cifar
from trjax.data.sources import load

COUNT = 6


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few examples each, in every other way as published."""
    from dataclasses import replace

    def shrink(files: Any) -> Any:
        return tuple((name, COUNT) for name, _ in files)

    small = {
        name: tuple(replace(layout, train=shrink(layout.train), test=shrink(layout.test)) for layout in layouts)
        for name, layouts in cifar._LAYOUTS.items()
    }
    monkeypatch.setattr(cifar, "_LAYOUTS", small)


def make_rows(name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (COUNT, 3072), dtype=np.uint8), random.integers(
        0, 10 if name == "cifar10" else 100, COUNT
    )


def write(name: str, version: int, root: Path) -> tuple[Path, list[tuple[np.ndarray, np.ndarray]]]:
    """Writes the extracted folder of the python (0) or binary (1) version."""
    layout = cifar._LAYOUTS[name][version]
    folder = root / layout.folder
    folder.mkdir(parents=True)
    parts = []
    for seed, (file, _) in enumerate(layout.train + layout.test):
        pixels, labels = make_rows(name, seed)
        parts.append((pixels, labels))
        if version == 0:
            content = pickle.dumps(
                {b"data": pixels, layout.label_key: labels.tolist(), b"batch_label": b"x"}, protocol=2
            )
        else:
            coarse = np.zeros((COUNT, layout.label_bytes - 1), np.uint8)
            content = np.concatenate([coarse, labels[:, None].astype(np.uint8), pixels], 1).tobytes()
        (folder / file).write_bytes(content)
    return folder, parts


def pack(folder: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, folder.name)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("form", ["folder", "folder itself", "archive"])
def test_all_published_forms(name: str, version: int, form: str, tmp_path: Path) -> None:
    folder, parts = write(name, version, tmp_path / "made")
    root = {"folder": folder.parent, "folder itself": folder, "archive": tmp_path / "packed"}[form]
    if form == "archive":
        root.mkdir()
        pack(folder, root / cifar._LAYOUTS[name][version].archive)
    train, test = load(DataConfig(source=name, root=str(root)))  # type: ignore[arg-type]
    assert len(train) == COUNT * (len(parts) - 1)
    images, labels = train.read(np.array([0, COUNT - 1]))
    for image, label, row in zip(images, labels, (0, COUNT - 1), strict=True):
        np.testing.assert_array_equal(image[:, :, 1].ravel(), parts[0][0][row, 1024:2048])
        assert label == parts[0][1][row]
    np.testing.assert_array_equal(test.read(np.arange(COUNT))[1], parts[-1][1])
    assert images.dtype == np.uint8
    assert labels.dtype == np.int32


class Malicious:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("owned"),))


def damage(kind: str, path: Path) -> None:
    content = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "other":
        path.write_bytes(b"<html>404</html>")
    elif kind == "malicious":
        path.write_bytes(pickle.dumps(Malicious()))
    elif kind == "wrong count":
        path.write_bytes(pickle.dumps({b"data": np.zeros((3, 3072), np.uint8), b"labels": [0, 1, 2]}, protocol=2))
    elif kind == "wrong label":
        path.write_bytes(
            pickle.dumps({b"data": np.zeros((COUNT, 3072), np.uint8), b"labels": [11] * COUNT}, protocol=2)
        )


@pytest.mark.parametrize("kind", ["missing", "truncated", "empty", "other", "malicious", "wrong count", "wrong label"])
@pytest.mark.parametrize("packed", [False, True])
def test_damaged_file_is_named(kind: str, packed: bool, tmp_path: Path) -> None:
    folder, _ = write("cifar10", 0, tmp_path / "made")
    damage(kind, folder / "data_batch_3")
    root = folder.parent
    if packed:
        root = tmp_path / "packed"
        root.mkdir()
        pack(folder, root / "cifar-10-python.tar.gz")
    with pytest.raises(
        ValueError, match=r"data_batch_3 is (missing|damaged).*expected 6 examples of 3072 bytes.*get cifar-10-python"
    ):
        cifar.load_cifar("cifar10", str(root))
    assert not Path("owned").exists()


@pytest.mark.parametrize("cut", [0, 10, 1000])
def test_truncated_archive_is_named(cut: int, tmp_path: Path) -> None:
    folder, _ = write("cifar10", 1, tmp_path / "made")
    pack(folder, tmp_path / "cifar-10-binary.tar.gz")
    archive = tmp_path / "cifar-10-binary.tar.gz"
    archive.write_bytes(archive.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz.*cifar.html"):
        cifar.load_cifar("cifar10", str(tmp_path))


def test_link_in_an_archive_is_not_followed(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as file:
        link = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(link, io.BytesIO())
    with pytest.raises(ValueError, match="data_batch_1 is missing"):
        cifar.load_cifar("cifar10", str(tmp_path))


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (
            "",
            r"needs --data.root: a folder with cifar-10-batches-py/ or cifar-10-python.tar.gz, .*; get one from https",
        ),
        ("nowhere", r"data.root=nowhere is not a folder"),
        (".", r"data.root=\. holds no cifar10; expected cifar-10-batches-py/"),
    ],
)
def test_nothing_there(root: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cifar.load_cifar("cifar10", root)
