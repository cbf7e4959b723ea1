import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trjax.files import atomic_write

pytestmark = pytest.mark.fast


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for content in ("one", "two"):
        with atomic_write(path) as partial:
            assert partial == tmp_path / "a.txt.partial"
            partial.write_text(content)
        assert path.read_text() == content

    def fail(error: BaseException) -> None:
        with atomic_write(path) as partial:
            partial.write_text("cut o")
            raise error

    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fail(error)
        assert (path.read_text(), os.listdir(tmp_path)) == ("two", ["a.txt"])


def test_the_contents_reach_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls = tmp_path / "a.txt", list[str]()
    rename = Path.replace

    def replace(self: Path, target: Path) -> Path:
        calls.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", lambda _: calls.append("sync"))
    monkeypatch.setattr(Path, "replace", replace)
    for durable in (False, True):
        with atomic_write(path, durable) as partial:
            partial.write_text("x")
    assert calls == ["rename", "sync", "rename"]


def test_a_disk_that_fails_to_sync_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), atomic_write(path, durable=True) as partial:
        partial.write_text("new")
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["a.txt"])


def test_a_killed_process_leaves_the_old_file_and_the_unfinished_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    code = (
        "import os, signal; from pathlib import Path; from trjax.files import atomic_write\n"
        "with atomic_write(Path('a.txt')) as partial:\n"
        "    partial.write_text('ne'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == -signal.SIGKILL
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.txt": "old", "a.txt.partial": "ne"}
