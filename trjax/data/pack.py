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
from typing import Annotated, TypeVar

import cv2
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from pydantic import Field

from trjax.config.checks import Checked
from trjax.data import shards
from trjax.data.folders import SPLITS, Files, find_splits, index_folder
from trjax.data.image_files import ReportProgress, count_cores
from trjax.data.images import open_image
from trjax.data.jpeg import BadImageError, Jpeg, encode_jpeg
from trjax.data.shards import BadImage, Index, Shard, ShardInfo
from trjax.files import atomic_write

_SAMPLE = 64  # images that identify a source, and give the mean size of a packed image
_AT_A_TIME = 1024  # images that wait to be written, at most
_WRITER = "group_size:1,uncompressed"  # each image by itself; JPEG does not compress
_OWN = re.compile(r"(shard-\d{5}-of-\d{5}\.array_record(\.json)?|index\.json|unfinished\.json)(\.partial)?")

T = TypeVar("T")


@dataclass(frozen=True)
class PackOptions(Checked):
    """How to pack."""

    max_side: Annotated[int, Field(ge=1, le=32768)] = 400
    """Longest side of a packed image, in pixels. A smaller JPEG is kept byte for byte."""
    quality: Annotated[int, Field(ge=1, le=100)] = 90
    """JPEG quality of all other images."""
    shard_mb: Annotated[float, Field(ge=1e-6, le=1e6)] = 256.0
    """Approximate size of a shard, in MiB."""
    workers: Annotated[int, Field(ge=1, le=1024)] = count_cores()
    """Number of threads; the default is one a core."""


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


def _describe(files: Files, options: PackOptions) -> ShardInfo:
    """Returns what is to be packed, and into how many shards, by the size of some images."""
    digest = hashlib.sha256(json.dumps(files.classes).encode())
    for part in (files.names, files.ends.tobytes(), files.labels.tobytes()):
        digest.update(part)
    sizes = []
    for index in sorted({round(at) for at in np.linspace(0, len(files) - 1, _SAMPLE)}):
        data = files.read(index).data
        digest.update(hashlib.sha256(data).digest())
        with suppress(BadImageError):
            sizes.append(len(shrink(data, options.max_side, options.quality)))
    of_a_shard = max(1, int(options.shard_mb * 2**20 / float(np.mean(sizes or [1]))))
    num_shards = -(-len(files) // of_a_shard)
    return ShardInfo(digest.hexdigest(), options.max_side, options.quality, options.shard_mb, num_shards)


def _refuse_others(folder: Path, own: Sequence[str]) -> None:
    """Raises ValueError if a folder holds anything but hidden files and those that are a pack's own."""
    if others := sorted(name for name in os.listdir(folder) if name not in own and not name.startswith(".")):
        raise ValueError(f"{folder} holds something else, {shards.printable(others[0])} for one; name another folder")


def _begin(folder: Path, about: ShardInfo) -> ShardInfo:
    """Returns what a folder was begun with, which must be the same but for the number of shards.

    Raises:
        ValueError: it is not, or the folder holds something else.
    """
    if (folder / shards.INDEX).exists():
        begun = shards.read_index(folder).about
    elif (folder / shards.UNFINISHED).exists():
        begun = shards.read_json(folder / shards.UNFINISHED, lambda table: ShardInfo(**table))
    else:
        _refuse_others(folder, (f"{shards.UNFINISHED}.partial",))
        shards.write_json(folder / shards.UNFINISHED, about)
        return about
    if begun.source != about.source:
        raise ValueError(
            f"{folder} holds images of another source, or the source has changed since; remove it to pack again"
        )
    for option in ("max_side", "quality", "shard_mb"):
        if (was := getattr(begun, option)) != (asked := getattr(about, option)):
            raise ValueError(f"{folder} was begun with {option}={was}, not {asked}; pass that, or name another folder")
    return begun


def _read_finished(folder: Path) -> dict[str, Shard]:
    """Returns the shards that are complete, by the names of their files."""
    if (folder / shards.INDEX).exists():
        found = list(shards.read_index(folder).shards)
    else:
        found = []
        for path in folder.glob("*.array_record.json"):
            with suppress(ValueError):  # then its shard is packed again
                found.append(shards.read_json(path, shards.make_shard))
    return {shard.file: shard for shard in found if not shards.find_fault(folder, shard)}


def _convert(files: Files, options: PackOptions, index: int) -> bytes | BadImage:
    """Returns an image's record, or what is wrong with it."""
    name, (data, label) = files.name(index), files.read(index)
    try:
        return shards.encode_record(name, label, shrink(data, options.max_side, options.quality))
    except BadImageError as error:
        return BadImage(index, name, str(error))


def _write_shard(
    files: Files, folder: Path, options: PackOptions, name: str, indices: range, report: ReportProgress
) -> Shard:
    """Packs a shard, and notes that it is complete.

    Raises:
        OSError: the file cannot be written, or an image cannot be read.
    """
    path = folder / name
    left_out = []
    convert = partial(_convert, files, options)
    with atomic_write(path, durable=True) as unfinished:
        writer = ArrayRecordWriter(str(unfinished), _WRITER)
        try:
            with closing(in_order(convert, indices, options.workers)) as converted:
                for done, record in enumerate(converted, indices.start + 1):
                    if isinstance(record, BadImage):
                        left_out.append(record)
                    else:
                        writer.write(record)
                    report(folder.name, done, len(files))
            writer.close()
        except RuntimeError as error:  # the only one that ArrayRecord raises
            reason = str(error).partition(";")[0].removeprefix("write() failed: ")
            why = "what is finished is kept: make room, and start again to resume"
            raise OSError(f"{unfinished}: {reason}; {why}") from error
        finally:
            with suppress(RuntimeError):  # closing twice does no harm
                writer.close()
        digest = shards.digest_file(unfinished)
    shard = Shard(name, len(indices) - len(left_out), path.stat().st_size, digest, tuple(left_out))
    shards.write_json(folder / f"{name}.json", shard)
    return shard


def _end(files: Files, folder: Path, about: ShardInfo, complete: Sequence[Shard]) -> Index:
    """Marks a split as complete, and removes the files that only a pack to be resumed needs."""
    labels = np.delete(files.labels, [bad.index for shard in complete for bad in shard.left_out])
    if not len(labels):
        raise ValueError(f"{files.root}: none of its {len(files):,} images can be read")
    counts = np.bincount(labels, minlength=len(files.classes))
    index = Index(about, files.classes, tuple(map(int, counts)), len(labels), tuple(complete))
    shards.write_json(folder / shards.INDEX, index)
    for name in os.listdir(folder):
        if _OWN.fullmatch(name) and name not in (shards.INDEX, *(shard.file for shard in complete)):
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


def pack_split(files: Files, folder: Path, options: PackOptions, report: ReportProgress = lambda *_: None) -> Index:
    """Packs the images of a split, or what is missing of them.

    Raises:
        ValueError: the folder holds something else, or no image can be read.
        OSError: a file cannot be read or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        about = _begin(folder, _describe(files, options))
        bounds = [len(files) * number // about.num_shards for number in range(about.num_shards + 1)]
        finished = _read_finished(folder)
        complete = []
        for number, (start, end) in enumerate(pairwise(bounds)):
            name = f"shard-{number:05}-of-{about.num_shards:05}.array_record"
            complete.append(finished.get(name) or _write_shard(files, folder, options, name, range(start, end), report))
        return _end(files, folder, about, complete)


def pack(
    source: Path, target: Path, options: PackOptions, report: ReportProgress = lambda *_: None
) -> dict[str, Index]:
    """Packs all splits of a folder of images.

    Raises:
        ValueError: there are none, or the target is in the way.
        OSError: a file cannot be read or written.
    """
    if target.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{target} lies in {source}, whose images it is to hold; name a folder outside of it")
    if not (found := find_splits(source)):
        raise ValueError(
            f"{source} holds none of the folders {', '.join(SPLITS)}; expected {source}/train/CLASS/*.JPEG"
        )
    if target.is_dir():
        _refuse_others(target, SPLITS)
    splits = {name: index_folder(folder) for name, folder in found.items()}
    return {name: pack_split(files, target / name, options, report) for name, files in splits.items()}
