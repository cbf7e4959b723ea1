"""A packed split: its images in a few large files, which many readers get at faster than at a million small ones.

A split is a folder of shards, ArrayRecord files of one record an image, and `index.json`, written last: where it is
missing, the pack has not ended. A record is the label (int32), the length of the name (uint16), both little-endian,
the name, and the image's file.
"""

import hashlib
import json
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from array_record.python.array_record_module import ArrayRecordReader

from trjax.data.image_files import Encoded
from trjax.files import atomic_write

INDEX = "index.json"
"""Names the shards of a split that is packed to its end."""
UNFINISHED = "unfinished.json"
"""Lies in its place until then: what is being packed, and how."""
FORMAT = 1
T = TypeVar("T")
_HEADER = struct.Struct("<iH")
_READER = {"options": "readahead_buffer_size:0,max_parallelism:0", "file_reader_buffer_size": 32768}  # for lone records


@dataclass(frozen=True)
class ShardInfo:
    """What a split was packed from, and how.

    Attributes:
        source: SHA-256 of all names and labels, and of some images.
        max_side: pixels of the longer side.
        quality: of JPEG, for images that were encoded again.
        shard_mb: MiB of a shard, about.
        num_shards: how many there are.
    """

    source: str
    max_side: int
    quality: int
    shard_mb: float
    num_shards: int


@dataclass(frozen=True)
class BadImage:
    """An image that cannot be used.

    Attributes:
        index: its index in the source.
        name: its file name.
        reason: what is wrong with it.
    """

    index: int
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{printable(self.name)}: {printable(self.reason)}"


@dataclass(frozen=True)
class Shard:
    """One file of records.

    Attributes:
        file: its name.
        records: how many it holds.
        size_bytes: of the file.
        sha256: of the file.
        left_out: images that were to be in it.
    """

    file: str
    records: int
    size_bytes: int
    sha256: str
    left_out: tuple[BadImage, ...]


@dataclass(frozen=True)
class Index:
    """What `index.json` says.

    Attributes:
        about: what was packed, and how.
        classes: names, in the order of the labels.
        class_examples: images of each class.
        examples: images in all shards.
        shards: in order.
    """

    about: ShardInfo
    classes: tuple[str, ...]
    class_examples: tuple[int, ...]
    examples: int
    shards: tuple[Shard, ...]


def printable(name: str) -> str:
    r"""Returns a file's name on one line, whatever it is made of.

    >>> printable("föhn.jpg"), printable("two\nlines")
    ('föhn.jpg', "'two\\nlines'")
    """
    return name if name.isprintable() else ascii(name)


def encode_record(name: str, label: int, data: bytes) -> bytes:
    """Returns an image as a record."""
    encoded = os.fsencode(name)
    return _HEADER.pack(label, len(encoded)) + encoded + data


def write_json(path: Path, content: Any) -> None:
    """Writes a dataclass as a JSON file, complete or not at all, even if the power fails."""
    with atomic_write(path, durable=True) as partial:
        partial.write_text(json.dumps({"format": FORMAT} | asdict(content), indent=1) + "\n", encoding="ascii")


def digest_file(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_shard(table: Mapping[str, Any]) -> Shard:
    """Returns a shard from its table in a JSON file.

    Raises:
        ValueError, KeyError, TypeError: it is no such table.
    """
    name, records, size_bytes = table["file"], table["records"], table["size_bytes"]
    if Path(name).name != name or not (type(records) is type(size_bytes) is int):
        raise ValueError(f"file={name!r} with records={records!r} and size_bytes={size_bytes!r}")
    return Shard(name, records, size_bytes, table["sha256"], tuple(BadImage(**left) for left in table["left_out"]))


def read_json(path: Path, make: Callable[[dict[str, Any]], T]) -> T:
    """Returns what `make` makes of the table in a JSON file of this module, without its format.

    Raises:
        ValueError: it is damaged, or of another format.
        OSError: it cannot be read.
    """
    try:
        found = (table := dict(json.loads(path.read_bytes()))).pop("format")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    if found != FORMAT:
        raise ValueError(f"{path} is of format {found!r}; this version reads format {FORMAT}")
    try:
        return make(table)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error})") from error


def _make_index(table: Mapping[str, Any]) -> Index:
    counts = tuple(table["class_examples"])
    shards = tuple(make_shard(shard) for shard in table["shards"])
    index = Index(ShardInfo(**table["about"]), tuple(table["classes"]), counts, table["examples"], shards)
    if not sum(counts) == index.examples == sum(shard.records for shard in shards):
        raise ValueError(f"examples={index.examples}, with other numbers of them in its classes or shards")
    if len(counts) != len(index.classes) or len(shards) != index.about.num_shards:
        raise ValueError(f"{len(index.classes)} classes and {len(shards)} shards")
    return index


def read_index(folder: Path) -> Index:
    """Returns what `index.json` says of a packed split; looks at no shard.

    Raises:
        ValueError: it is missing or damaged.
        OSError: it cannot be read.
    """
    if not (path := folder / INDEX).is_file():
        if (folder / UNFINISHED).is_file():
            raise ValueError(f"{folder}: its pack has not ended; start `python -m trjax.data pack` again to resume")
        raise ValueError(f"{folder} holds no packed images: {INDEX} is missing")
    return read_json(path, _make_index)


def find_fault(folder: Path, shard: Shard, read: bool = False) -> str:
    """Returns what is wrong with the size of a shard's file or, if it is to be read, its bytes; nothing: ""."""
    if not (path := folder / shard.file).is_file():
        return "it is missing"
    if (size_bytes := path.stat().st_size) != shard.size_bytes:
        return f"it has {size_bytes:,} bytes, not {shard.size_bytes:,}"
    changed = read and digest_file(path) != shard.sha256
    return "its bytes have changed since it was packed (SHA-256)" if changed else ""


@dataclass(frozen=True)
class Shards:
    """The images of a packed split, in any order, by several threads at a time; see `ImageFiles`.

    A shard is opened when the first of its images is read. Copies for other processes open their own.

    Attributes:
        folder: of the split.
        classes: names, in the order of the labels.
        shards: in order.
    """

    folder: Path
    classes: tuple[str, ...]
    shards: tuple[Shard, ...]
    _readers: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def _ends(self) -> list[int]:
        """Images up to the end of each shard."""
        return list(accumulate(shard.records for shard in self.shards))

    def __len__(self) -> int:
        """Returns the number of images."""
        return self._ends[-1] if self.shards else 0

    def __reduce__(self) -> Any:
        return type(self), (self.folder, self.classes, self.shards)

    def _find(self, index: int) -> tuple[int, int]:
        """Returns the number of an image's shard, and its place there."""
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)

    def _reader(self, number: int) -> Any:
        if (reader := self._readers.get(number)) is not None:
            return reader
        path, records = self.folder / self.shards[number].file, self.shards[number].records
        reader = ArrayRecordReader(str(path), **_READER)
        if (found := reader.num_records()) != records:  # 0 if it cannot be opened at all
            raise OSError(f"{path}: {found} records can be read, not {records}")
        return self._readers.setdefault(number, reader)  # of two threads that open one, both take the first

    def read_named(self, index: int) -> tuple[str, Encoded]:
        """Returns an image's name, and the image.

        Raises:
            OSError: it cannot be read, or is damaged.
        """
        number, position = self._find(index)
        try:
            record = self._reader(number).read([position])[0]
        except RuntimeError as error:  # ArrayRecord's only one
            reason = str(error).partition(" (")[0]
            raise OSError(f"{self.folder / self.shards[number].file}, record {position}: {reason}") from error
        if len(record) < _HEADER.size:
            raise OSError(f"a record of {len(record)} bytes holds no image")
        label, length = _HEADER.unpack_from(record)
        end = _HEADER.size + length
        return os.fsdecode(record[_HEADER.size : end]), Encoded(record[end:], label)

    def name(self, index: int) -> str:
        """Returns what an image's file was called; if its record is damaged, which one that is."""
        try:
            return self.read_named(index)[0]
        except OSError:
            number, position = self._find(index)
            return f"{self.shards[number].file}[{position}]"

    def read(self, index: int) -> Encoded:
        """Returns an image.

        Raises:
            OSError: it cannot be read, or is damaged.
        """
        return self.read_named(index)[1]


def open_shards(folder: Path) -> Shards:
    """Returns the images of a packed split.

    Raises:
        ValueError: its pack has not ended, or a shard is missing or of the wrong size.
        OSError: a file cannot be read.
    """
    index = read_index(folder)
    for shard in index.shards:
        if fault := find_fault(folder, shard):
            raise ValueError(f"{folder / shard.file}: {fault}; pack it again, or get it from where it was copied")
    return Shards(folder, index.classes, index.shards)
