import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import CIFAR_COUNT, pack_cifar, shrink_cifar, write_cifar

from trjax.config.run import DataConfig
from trjax.data import cifar
from trjax.data.sources import load


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_cifar(monkeypatch)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("form", ["folder", "folder itself", "archive"])
def test_all_published_forms(name: str, version: int, form: str, tmp_path: Path) -> None:
    folder, parts = write_cifar(name, version, tmp_path / "made")
    root = {"folder": folder.parent, "folder itself": folder, "archive": tmp_path / "packed"}[form]
    if form == "archive":
        root.mkdir()
        pack_cifar(folder, root / cifar._LAYOUTS[name][version].archive)
    train, test = load(DataConfig(source=name, root=str(root)))  # type: ignore[arg-type]
    assert len(train) == CIFAR_COUNT * (len(parts) - 1)
    images, labels = train.read(np.array([0, CIFAR_COUNT - 1]))
    for image, label, row in zip(images, labels, (0, CIFAR_COUNT - 1), strict=True):
        np.testing.assert_array_equal(image[:, :, 1].ravel(), parts[0][0][row, 1024:2048])
        assert label == parts[0][1][row]
    np.testing.assert_array_equal(test.read(np.arange(CIFAR_COUNT))[1], parts[-1][1])
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
    elif kind == "list":
        path.write_bytes(pickle.dumps([1, 2]))
    elif kind == "wrong count":
        path.write_bytes(pickle.dumps({b"data": np.zeros((3, 3072), np.uint8), b"labels": [0, 1, 2]}, protocol=2))
    elif kind == "wrong label":
        path.write_bytes(
            pickle.dumps({b"data": np.zeros((CIFAR_COUNT, 3072), np.uint8), b"labels": [11] * CIFAR_COUNT}, protocol=2)
        )


@pytest.mark.parametrize(
    "kind", ["missing", "truncated", "empty", "other", "malicious", "list", "wrong count", "wrong label"]
)
@pytest.mark.parametrize("packed", [False, True])
def test_damaged_file_is_named(kind: str, packed: bool, tmp_path: Path) -> None:
    folder, _ = write_cifar("cifar10", 0, tmp_path / "made")
    damage(kind, folder / "data_batch_3")
    root = folder.parent
    if packed:
        root = tmp_path / "packed"
        root.mkdir()
        pack_cifar(folder, root / "cifar-10-python.tar.gz")
    with pytest.raises(
        ValueError, match=r"data_batch_3 is (missing|damaged).*expected 6 examples of 3072 bytes.*get cifar-10-python"
    ):
        cifar.load_cifar("cifar10", str(root))
    assert not Path("owned").exists()


@pytest.mark.parametrize("cut", [0, 10, 1000])
def test_truncated_archive_is_named(cut: int, tmp_path: Path) -> None:
    folder, _ = write_cifar("cifar10", 1, tmp_path / "made")
    pack_cifar(folder, tmp_path / "cifar-10-binary.tar.gz")
    archive = tmp_path / "cifar-10-binary.tar.gz"
    archive.write_bytes(archive.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz.*cifar.html"):
        cifar.load_cifar("cifar10", str(tmp_path))


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (
            "",
            r"needs --data.root: a folder with cifar-10-batches-py/ or cifar-10-python.tar.gz, .*; get one from https",
        ),
        ("nowhere", r"data.root=nowhere is not a folder"),
        (".", r"data.root=\. holds no cifar10; expected a folder with cifar-10-batches-py/"),
        ("a" * 300, r"data.root=a* cannot be used \(File name too long\); expected a folder with cifar-10"),
        ("~no-such-user/x", r"data.root=~no-such-user/x cannot be used \(.*home"),
    ],
)
def test_nothing_there(root: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cifar.load_cifar("cifar10", root)
