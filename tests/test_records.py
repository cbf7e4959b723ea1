import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto.event_pb2 import Event

from trjax.run.records import Record, append_metrics, make_record, open_board, trim_metrics

pytestmark = pytest.mark.fast

PATH = Path("run/metrics.jsonl")


def line(step: int, split: str = "train") -> bytes:
    return json.dumps({"split": split, "epoch": 1, "step": step, "loss": None, "top1": 0.5}).encode()


def trim(content: bytes, step: int) -> tuple[bytes, bytes | None]:
    """What trimming leaves of a file in a folder of its own, and what it sets aside."""
    PATH.parent.mkdir(exist_ok=True)
    for path in PATH.parent.iterdir():
        path.unlink()
    PATH.write_bytes(content)
    aside = trim_metrics(PATH, step)
    assert set(PATH.parent.iterdir()) == {PATH, *([aside] if aside else [])}
    return PATH.read_bytes(), aside.read_bytes() if aside else None


RECORDS = st.builds(line, st.integers(0, 20), st.sampled_from(["train", "test"]))
OTHERS = st.sampled_from([
    b"null", b"3", b"[]", b"{}", b'"text"', b"[" * 5000, b"epoch 1", b"\xff\xfe", b"\0\0\0", b"\xef\xbb\xbf" + line(1),
    line(1).replace(b"1,", b"1.0,"), b'{"split": "train", "step": "3"}', b'{"split": "train", "step": true}',
    b'{"split": "train", "step": null}', b'{"split": "dev", "step": 3}', b'{"step": 3, "loss": 1.5}',
    b'{"split": "train", "step": ' + b"9" * 5000 + b"}", line(1)[:30], line(1) + line(2),
    line(1).decode().encode("utf-16"),
])  # fmt: skip
CUT_OFF = st.builds(lambda whole, length: whole[: length % len(whole)], RECORDS, st.integers(0))


@given(st.lists(RECORDS, max_size=5), st.integers(0, 20), CUT_OFF)
def test_lines_to_be_done_again_go_with_one_that_was_cut_off(lines: list[bytes], step: int, cut_off: bytes) -> None:
    content = b"".join(text + b"\n" for text in lines)
    kept = b"".join(text + b"\n" for text in lines if json.loads(text)["step"] <= step)
    assert trim(content + cut_off, step) == (kept, None)


@given(st.lists(RECORDS, max_size=3), st.lists(OTHERS, min_size=1, max_size=3), st.randoms(), CUT_OFF | OTHERS)
def test_a_file_with_anything_else_is_set_aside_whole(
    lines: list[bytes], others: list[bytes], random: Any, last: bytes
) -> None:
    mixed = [*lines, *others]
    random.shuffle(mixed)
    kept = b"".join(text + b"\n" for text in mixed if text in lines)
    content = b"".join(text + b"\n" for text in mixed) + last
    assert trim(content, 20) == (kept, content)


@given(OTHERS.filter(lambda other: other != line(1)[:30]))
def test_an_end_that_is_no_beginning_of_a_line_is_not_dropped(last: bytes) -> None:
    content = line(1) + b"\n" + last
    assert trim(content, 1) == (line(1) + b"\n", content)


@given(st.binary() | st.text().map(str.encode), st.integers(0))
def test_no_bytes_are_lost(content: bytes, step: int) -> None:
    left, aside = trim(content, step)
    assert left == b""  # a record is not found by chance
    assert aside == content or not content.strip() or b'{"split": "'.startswith(content)


def test_what_is_right_is_not_written_again() -> None:
    trim(line(1) + b"\n", 1)
    before = PATH.stat()
    assert trim_metrics(PATH, 1) is None
    assert (PATH.stat().st_ino, PATH.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert trim(line(1), 1) == (line(1) + b"\n", None)  # the next one begins a line


def test_every_file_set_aside_keeps_its_name() -> None:
    PATH.parent.mkdir()
    for number, name in enumerate(["metrics.jsonl.damaged", "metrics.jsonl.damaged1", "metrics.jsonl.damaged2"]):
        PATH.write_bytes(b"%d\n" % number)
        assert trim_metrics(PATH, 3) == PATH.with_name(name)
        assert PATH.with_name(name).read_bytes() == b"%d\n" % number


def test_missing_empty_and_a_folder_in_its_place() -> None:
    PATH.parent.mkdir()
    assert trim_metrics(PATH, 3) is None
    assert not PATH.exists()
    assert trim(b"", 3) == (b"", None)
    PATH.unlink()
    PATH.mkdir()
    with pytest.raises(IsADirectoryError, match=r"metrics\.jsonl"):
        trim_metrics(PATH, 3)


def test_what_is_appended_is_kept_up_to_its_step() -> None:
    PATH.parent.mkdir()
    for step in (1, 2):
        rest = {"epoch": 1, "step": step, "skipped": 0, "learning_rate": 0.1, "images_per_second": 1.0, "seconds": 1.0}
        append_metrics(PATH, make_record("train", np.array([np.inf, 2, 2, 2]), **rest))
    first, second = PATH.read_bytes().splitlines(keepends=True)
    assert trim(first + second, 1) == (first, None)
    for cut in range(len(second) - 1):
        assert trim(first + second[:cut], 9) == (first, None)


def events(folder: Path) -> list[tuple[str, int, float]]:
    """What TensorBoard finds: length, its checksum, an event, its checksum, and so on."""
    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            data = data[16 + length :]
    return found


def test_tensorboard_gets_every_record(tmp_path: Path) -> None:
    record = Record("train", 1, 5, 0.5, 0.25, 0.75, 100, 0, 0.1, 1000.0, 1.0)
    with open_board(tmp_path / "board", 0) as write:
        write(record)
        write(replace(record, split="test", step=7))
    names = ("loss", "top1", "top5", "images_per_second")
    values = (0.5, 0.25, 0.75, 1000.0)
    train = [(f"train/{name}", 5, value) for name, value in zip(names, values, strict=True)]
    test = [(f"test/{name}", 7, value) for name, value in zip(names, values, strict=True)]
    assert events(tmp_path / "board") == [*train, ("train/learning_rate", 5, pytest.approx(0.1)), *test]
    with open_board(None, 0) as write:
        write(record)
