"""From folders of images to shards: each image no larger than a training needs it, in the order of its folder.

Images are converted by threads: decoding, shrinking and encoding hold no lock of Python's, so that they keep all
cores busy (what does hold it takes a few percent of an image's time), and Ctrl-C reaches them at once. Shards are
written one after the other: a pack that is killed loses only one.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import cv2
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from trjax.data.folders import Files, index_folder
from trjax.data.image_files import ReportProgress
from trjax.data.images import open_image
from trjax.data.jpeg import BadImageError, Jpeg, encode_jpeg
from trjax.data.shards import (
    INDEX,
    UNFINISHED,
    Index,
    LeftOut,
    Shard,
    ShardInfo,
    encode_record,
    find_fault,
    make_shard,
    printable,
    read_index,
    read_json,
    shard_name,
    write_json,
)
from trjax.data.splits import SPLITS, find_splits
from trjax.files import atomic_write

_SAMPLE = 64  # images that tell one source from another, and how large an image gets
_AT_A_TIME = 1024  # images that wait to be written, at most
_LIMITS = {"max_side": (1, 32768), "quality": (1, 100), "shard_mb": (1e-6, 1e6), "workers": (1, 1024)}
_WRITER = "group_size:1,uncompressed"  # each image by itself; JPEG does not compress
_OWN = re.compile(r"(shard-\d{5}-of-\d{5}\.array_record(\.json)?|index\.json|unfinished\.json)(\.partial)?")

T = TypeVar("T")


@dataclass(frozen=True)
class How:
    """How to pack.

    Attributes:
        max_side: pixels of the longer side, at most.
        quality: of JPEG.
        shard_mb: MiB of a shard, about.
        workers: threads.
    """

    max_side: int
    quality: int
    shard_mb: float
    workers: int

    def __post_init__(self) -> None:
        for option, (least, most) in _LIMITS.items():
            if not least <= (value := getattr(self, option)) <= most:
                raise ValueError(f"{option}={value}: must be from {least:g} to {most:g}")


def in_order(do: Callable[[int], T], indices: Sequence[int], workers: int) -> Generator[T, None, None]:
    """Yields what a function returns for each index, in order, computed by threads ahead of what is asked for."""
    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(indices), _AT_A_TIME):
            yield from pool.map(do, indices[start : start + _AT_A_TIME])


def shrink(data: bytes, max_side: int, quality: int) -> bytes:
    """Returns an image as a JPEG file whose longer side is at most `max_side`; unchanged if it is one already.

    Raises:
        BadImageError: see `open_image`.
    """
    image = open_image(data)
    share = max_side / max(image.height, image.width)
    pixels = image.decode(share)  # also where it is only to be seen whether it can be
    if share < 1:
        size = max(1, round(image.width * share)), max(1, round(image.height * share))
        pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    elif isinstance(image, Jpeg):
        return data
    return encode_jpeg(pixels, quality)


def _describe(files: Files, how: How) -> ShardInfo:
    """Returns what is to be packed, and into how many shards, by the size of some images."""
    digest = hashlib.sha256(json.dumps(files.classes).encode())
    for part in (files.names, files.ends.tobytes(), files.labels.tobytes()):
        digest.update(part)
    sizes = []
    for index in sorted({round(at) for at in np.linspace(0, len(files) - 1, _SAMPLE)}):
        data = files.read(index).data
        digest.update(hashlib.sha256(data).digest())
        with suppress(BadImageError):
            sizes.append(len(shrink(data, how.max_side, how.quality)))
    of_a_shard = max(1, int(how.shard_mb * 2**20 / float(np.mean(sizes or [1]))))
    return ShardInfo(digest.hexdigest(), how.max_side, how.quality, how.shard_mb, -(-len(files) // of_a_shard))


def _begin(folder: Path, about: ShardInfo) -> ShardInfo:
    """Returns what a folder was begun with, which must be the same but for the number of shards.

    Raises:
        ValueError: it is not, or the folder holds something else.
    """
    if (folder / INDEX).exists():
        begun = read_index(folder).about
    elif (folder / UNFINISHED).exists():
        try:
            begun = ShardInfo(**read_json(folder / UNFINISHED))
        except TypeError as error:
            raise ValueError(f"{folder / UNFINISHED} is damaged ({error})") from error
    else:
        if others := [name for name in os.listdir(folder) if not name.startswith((".", f"{UNFINISHED}.partial"))]:
            raise ValueError(f"{folder} holds something else, {printable(others[0])} for one; name another folder")
        write_json(folder / UNFINISHED, about)
        return about
    if begun.source != about.source:
        raise ValueError(
            f"{folder} holds images of another source, or the source has changed since; remove it to pack anew"
        )
    for option in ("max_side", "quality", "shard_mb"):
        if (was := getattr(begun, option)) != (asked := getattr(about, option)):
            raise ValueError(f"{folder} was begun with {option}={was}, not {asked}; pass that, or name another folder")
    return begun


def _read_finished(folder: Path) -> dict[str, Shard]:
    """Returns the shards that are complete, by the names of their files."""
    if (folder / INDEX).exists():
        shards = list(read_index(folder).shards)
    else:
        shards = []
        for path in folder.glob("*.array_record.json"):
            with suppress(ValueError, KeyError, TypeError):  # then its shard is packed again
                shards.append(make_shard(read_json(path)))
    return {shard.file: shard for shard in shards if not find_fault(folder, shard)}


def _convert(files: Files, how: How, index: int) -> bytes | LeftOut:
    """Returns an image's record, or what is wrong with it."""
    name, (data, label) = files.name(index), files.read(index)
    try:
        return encode_record(name, label, shrink(data, how.max_side, how.quality))
    except BadImageError as error:
        return LeftOut(index, name, str(error))


def _write_records(path: Path, converted: Iterator[bytes | LeftOut], done: Callable[[int], None]) -> list[LeftOut]:
    """Writes a shard's file, and returns what is not in it; `done` is told how many records have come.

    Raises:
        OSError: it cannot be written; or an image cannot be read.
    """

    def attempt(do: Callable[..., Any], *arguments: Any) -> None:
        try:
            do(*arguments)
        except RuntimeError as error:  # ArrayRecord's only one
            reason = str(error).partition(";")[0].removeprefix("write() failed: ")
            raise OSError(f"{path}: {reason}; what is finished is kept: make room, and start again to go on") from error

    writer, left_out = ArrayRecordWriter(str(path), _WRITER), list[LeftOut]()
    try:
        for count, record in enumerate(converted, start=1):
            if isinstance(record, LeftOut):
                left_out.append(record)
            else:
                attempt(writer.write, record)
            done(count)
        attempt(writer.close)
    except BaseException:
        with suppress(RuntimeError):
            writer.close()
        raise
    return left_out


def _write_shard(files: Files, folder: Path, how: How, name: str, indices: range, report: ReportProgress) -> Shard:
    """Packs a shard, and notes that it is complete."""
    path = folder / name
    convert = partial(_convert, files, how)
    with atomic_write(path, durable=True) as unfinished:
        with closing(in_order(convert, indices, how.workers)) as converted:
            left_out = _write_records(
                unfinished, converted, lambda count: report(folder.name, indices.start + count, len(files))
            )
        with unfinished.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    shard = Shard(name, len(indices) - len(left_out), path.stat().st_size, digest, tuple(left_out))
    write_json(folder / f"{name}.json", shard)
    return shard


def _end(files: Files, folder: Path, about: ShardInfo, shards: Sequence[Shard]) -> Index:
    """Marks a split as complete, and removes what only a pack needs that goes on."""
    kept = np.ones(len(files), bool)
    kept[[left.index for shard in shards for left in shard.left_out]] = False
    if not kept.any():
        raise ValueError(f"{files.root}: none of its {len(files):,} images can be read")
    counts = np.bincount(files.labels[kept], minlength=len(files.classes))
    index = Index(about, files.classes, tuple(map(int, counts)), int(kept.sum()), tuple(shards))
    write_json(folder / INDEX, index)
    for name in os.listdir(folder):
        if _OWN.fullmatch(name) and name not in (INDEX, *(shard.file for shard in shards)):
            (folder / name).unlink()
    return index


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other packs out of a folder.

    Raises:
        ValueError: one is in it.
    """
    # filelock locks a file, never the folder itself, and would leave that file among the shards.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems lock no folders
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{folder}: another pack is at work there") from None
        yield
    finally:
        os.close(descriptor)


def pack_split(files: Files, folder: Path, how: How, report: ReportProgress = lambda *_: None) -> Index:
    """Packs the images of a split, or what is missing of them.

    Raises:
        ValueError: the folder holds something else, or no image can be read.
        OSError: a file cannot be read or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        about = _begin(folder, _describe(files, how))
        bounds = [len(files) * number // about.num_shards for number in range(about.num_shards + 1)]
        finished, shards = _read_finished(folder), []
        for number, (start, end) in enumerate(pairwise(bounds)):
            name = shard_name(number, about.num_shards)
            shards.append(finished.get(name) or _write_shard(files, folder, how, name, range(start, end), report))
        return _end(files, folder, about, shards)


def pack(source: Path, target: Path, how: How, report: ReportProgress = lambda *_: None) -> dict[str, Index]:
    """Packs all splits of a folder of images.

    Raises:
        ValueError: there are none, or the target is in the way.
        OSError: a file cannot be read or written.
    """
    if target.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{target} lies in {source}, whose images it is to hold; name a folder outside of it")
    found = find_splits(source)
    if not found:
        raise ValueError(
            f"{source} holds none of the folders {', '.join(SPLITS)}; expected {source}/train/CLASS/*.JPEG"
        )
    if target.is_dir():
        others = sorted(name for name in os.listdir(target) if name not in SPLITS and not name.startswith("."))
        if others:
            raise ValueError(f"{target} holds something else, {printable(others[0])} for one; name another folder")
    splits = {name: index_folder(folder) for name, folder in found.items()}
    return {name: pack_split(files, target / name, how, report) for name, files in splits.items()}
