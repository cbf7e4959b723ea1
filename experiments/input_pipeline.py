"""How fast do images come from their files to crops, how many cores does a GPU take, and how soon does a run start?

The ways take turns with torchvision's `ImageFolder`, in a process of its own, which waits while ours are measured. A
core's images/s are those of a second of CPU time, which others on the machine hardly change; two workers are measured
by the clock. The images are made here: of ImageNet's usual size, with the spectrum of natural ones.
"""

import inspect
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import simplejpeg
from matplotlib.figure import Figure
from report import Common, Row, announce, main, progress, require_positive, save_axes, write_rows

from trjax.data.batches import epoch_order
from trjax.data.folders import Files, _cache_path, _write_cache, find_files, index_folder
from trjax.data.image_files import ImageFiles, ImageFileSource
from trjax.data.pack import PackOptions, pack_split
from trjax.data.shards import open_shards

HEIGHT, WIDTH, QUALITY, SUBSAMPLING = 375, 500, 90, "420"  # as most of ImageNet's files; about 100 kB each
PACKED_SIDE, SHARD_MB, SIZE = 400, 2.0, (224, 224)
PORTION = 64  # images that one way reads before another has its turn: the speed of a shared machine changes
READ_BATCH = 2  # examples that a worker reads at a time: few, so that two workers end a portion together
FIRST_BATCH = 256
NUM_CLASSES, NUM_LISTED = 1000, 1_300_000
WALKED_CLASSES, WALKED_FILES = 20, 20_000  # a real tree of empty files; what it takes is scaled to NUM_LISTED
GPU_RATES = (2500, 3000, 8000)  # published, and what `explain step` predicts for an H100
FFCV_RATE = 30_000 / 12
"""Images/s of a core, from raw pixels. Source: what FFCV's authors publish (Leclerc et al., 2023)."""
PEER, FILES, PACKED = "torchvision, Pillow", "files", f"packed, max side {PACKED_SIDE}"
FILES_2, PACKED_2 = f"{FILES}, 2 workers", f"{PACKED}, 2 workers"
REQUIRED = {FILES: (PEER, 2.5), PACKED: (PEER, 4.0), FILES_2: (FILES, 1.8), PACKED_2: (PACKED, 1.8)}
START_SECONDS = 2.0  # required of a second start


@dataclass(frozen=True)
class Options(Common):
    """Measure images/s from image files and from packed shards, with one worker and two, and the time to start."""

    repeats: int = 15
    """Measured turns of each way, after one turn to warm up."""
    images: int = 128
    """Images to make."""
    peer: str = sys.executable
    """A Python that can import torchvision; if it cannot, the table has no rows for torchvision."""
    quick: bool = False
    """Measure five turns of 64 images."""


def serve() -> None:
    """Answers lines "FOLDER START STOP" with torchvision's seconds, by the clock and of the CPU; 0 0: to list it."""
    torch, vision = import_module("torch"), import_module("torchvision")
    pillow, transforms = import_module("PIL"), import_module("torchvision.transforms")
    torch.set_num_threads(1)
    steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    steps.append(transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    known: dict[str, Any] = {}
    print(f"torch {torch.__version__}, torchvision {vision.__version__}, Pillow {pillow.__version__}", flush=True)
    for line in sys.stdin:
        folder, first, last = line.rsplit(" ", 2)
        began, used = time.perf_counter(), time.process_time()
        if int(last) == 0 or folder not in known:
            known[folder] = vision.datasets.ImageFolder(folder, transforms.Compose(steps))
        for index in range(int(first), int(last)):
            known[folder][index]
        print(time.perf_counter() - began, time.process_time() - used, flush=True)


def start_peer(python: str) -> subprocess.Popen[str]:
    """Starts `serve` in a Python that needs nothing of ours."""
    imports = "import sys, time\nfrom importlib import import_module\nfrom typing import Any"
    pipe = subprocess.PIPE
    text = f"{imports}\n{inspect.getsource(serve)}serve()"
    return subprocess.Popen([python, "-c", text], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)


def ask(peer: subprocess.Popen[str], folder: Path, indices: Sequence[int] = range(0)) -> tuple[float, float]:
    """Returns the peer's seconds to read images, or to list their folder; raises ValueError if it has ended."""
    assert peer.stdin
    assert peer.stdout
    print(folder, *((indices[0], indices[-1] + 1) if indices else (0, 0)), file=peer.stdin, flush=True)
    if not (said := peer.stdout.readline()):
        raise ValueError(f"torchvision's process ended when it was to read {folder}")
    wall, cpu = map(float, said.split())
    return wall, cpu


def make_images(folder: Path, count: int) -> Files:
    """Writes images of 1/f noise, which has much light and dark and little colour, and returns them; one class."""
    (folder / "class").mkdir(parents=True)
    random = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH))
    frequency[0, 0] = 1
    colours = np.array([[1, 0.9, 0.8], [0.2, 0.3, -0.3], [0.1, -0.2, 0.2]])
    for index in range(count):
        noise = np.fft.rfft2(random.normal(size=(3, HEIGHT, WIDTH))) / frequency**1.1
        planes = np.fft.irfft2(noise, s=(HEIGHT, WIDTH))
        planes /= planes.std(axis=(1, 2), keepdims=True)
        pixels = (128 + 45 * np.moveaxis(planes, 0, -1) @ colours).clip(0, 255).astype(np.uint8)
        data = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), QUALITY, colorsubsampling=SUBSAMPLING)
        (folder / "class" / f"{index:04}.JPEG").write_bytes(data)
    return index_folder(folder)


def read_all(images: ImageFiles, pool: Executor, indices: Sequence[int], epoch: int) -> tuple[float, float]:
    """Reads examples, a few at a time, and returns the seconds; raises ValueError if one cannot be read."""
    source = ImageFileSource(images, SIZE, stops=True)
    batches = [np.array(indices[start : start + READ_BATCH]) for start in range(0, len(indices), READ_BATCH)]
    began, used = time.perf_counter(), time.process_time()
    list(pool.map(lambda batch: source.read(batch, epoch)[1], batches))
    return time.perf_counter() - began, time.process_time() - used


def time_all(
    peer: subprocess.Popen[str] | None, files: Files, packed: ImageFiles, repeats: int
) -> dict[str, np.ndarray]:
    """Returns every way's seconds for an image, by the clock and of the CPU, shape (turns, 2)."""
    ways: dict[str, Callable[[Sequence[int], int], tuple[float, float]]] = {}
    if peer:
        ways[PEER] = lambda indices, epoch: ask(peer, files.root, indices)
    every = range(len(files))
    turns: list[np.ndarray] = []
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(2) as two:
        ways |= {FILES: partial(read_all, files, one), PACKED: partial(read_all, packed, one)}
        ways |= {FILES_2: partial(read_all, files, two), PACKED_2: partial(read_all, packed, two)}
        for turn in range(repeats + 1):
            portions = [every[start : start + PORTION] for start in every[::PORTION]]
            turns.append(np.sum([[way(portion, turn) for way in ways.values()] for portion in portions], axis=0))
            progress(f"turn {turn} of {repeats}")
    return dict(zip(ways, np.moveaxis(np.array(turns[1:]), 0, 1) / len(files), strict=True))  # the first warms up


def simulate_index(folder: Path) -> None:
    """Caches the index of 1.3 million images of a folder of 1000 empty ones, so that nobody has to write them."""
    classes = tuple(f"n{label:08}" for label in range(NUM_CLASSES))
    for name in classes:
        (folder / name).mkdir(parents=True)
    each = NUM_LISTED // NUM_CLASSES
    names = [f"{name}/{name}_{index}.JPEG".encode() for name in classes for index in range(each)]
    labels = np.repeat(np.arange(NUM_CLASSES, dtype=np.int32), each)
    files = Files(folder, classes, labels, b"".join(names), np.cumsum([len(name) for name in names], dtype=np.int64))
    seen = {str(path): path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}
    _write_cache(_cache_path(folder), files, seen)


def time_starts(
    peer: subprocess.Popen[str] | None, scratch: Path, images: ImageFiles, repeats: int
) -> dict[str, list[float]]:
    """Returns the seconds of every way to start, by the clock, a number a turn."""
    walked, listed, scale = scratch / "walked", scratch / "listed", NUM_LISTED / WALKED_FILES
    simulate_index(listed)
    for index in range(WALKED_FILES):
        name = f"n{index % WALKED_CLASSES:08}"
        (walked / name).mkdir(parents=True, exist_ok=True)
        (walked / name / f"{name}_{index}.JPEG").touch()
    times: dict[str, list[float]] = {}
    with ThreadPoolExecutor(2) as pool:
        for _ in range(repeats):
            found = {"torchvision's walk, scaled": ask(peer, walked)[0] * scale} if peer else {}
            start = time.perf_counter()
            find_files(walked)
            found["first start: walk, scaled"] = (time.perf_counter() - start) * scale
            start = time.perf_counter()
            files = index_folder(listed)  # finds no image, and says so, unless the index is cached
            found["second start: index, simulated"] = time.perf_counter() - start
            wanted = epoch_order(0, 0, len(files))[:FIRST_BATCH] % len(images)  # of the images that there are
            read_all(images, pool, wanted.tolist(), 0)
            found[f"second start: to {FIRST_BATCH} images"] = time.perf_counter() - start
            for name, seconds in found.items():
                times.setdefault(name, []).append(seconds)
    return times


def make_row(what: str, unit: str, values: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """Returns a row with the median and range of the values, of which nothing is required."""
    median, least, most = (float(f"{value:.3g}") for value in (np.median(values), np.min(values), np.max(values)))
    row = {"what": what, "unit": unit, "median": median, "least": least, "most": most, "cores busy": "-"}
    row |= {"against": "-", "ratio": "-", "required": "-", "met": "-"}
    cores = {f"cores at {rate}/s": f"{rate / np.median(values):.1f}" for rate in GPU_RATES}
    return row | (cores if unit == "images/core s" else dict.fromkeys(cores, "-"))


def make_rows(times: dict[str, np.ndarray], starts: dict[str, list[float]]) -> list[Row]:
    """Returns the table: ratios are medians of the turns', and cores those that one H100 takes at so many images/s."""
    rows = []
    for name, found in times.items():
        column = 0 if name in (FILES_2, PACKED_2) else 1  # by the clock, or of the CPU
        row = make_row(name, "images/s" if column == 0 else "images/core s", 1 / found[:, column])
        other, least = REQUIRED.get(name, ("", 0.0))
        if other in times:
            ratio = float(np.median(times[other][:, column] / found[:, column]))
            row |= {"against": other, "ratio": f"{ratio:.2f}", "required": f">= {least}"}
            row["met"] = "yes" if ratio >= least else "no"
        rows.append(row | {"cores busy": f"{np.median(found[:, 1] / found[:, 0]):.2f}"})
    ratio = float(np.median(FFCV_RATE * times[PACKED][:, 1]))
    rows.append(make_row("FFCV, raw, published", "images/core s", [FFCV_RATE]))
    rows[-1] |= {"against": PACKED, "ratio": f"{ratio:.2f}"}
    for name, seconds in starts.items():
        rows.append(make_row(name, "s", seconds))
        if name.startswith("second"):
            met = "yes" if np.median(seconds) < START_SECONDS else "no"
            rows[-1] |= {"required": f"< {START_SECONDS:g} s", "met": met}
    return rows


def draw(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draws the images/s of every way, from the least to the most of its turns, and what is required of it."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    shown = [row for row in rows if row["cores busy"] != "-"]
    colors = [{PEER: "#7f7f7f", FILES: "#08519c", PACKED: "#08519c"}.get(row["what"], "#9ecae1") for row in shown]
    spread = [[row["median"] - row["least"] for row in shown], [row["most"] - row["median"] for row in shown]]
    axes.barh([row["what"] for row in shown], [row["median"] for row in shown], 0.6, xerr=spread, color=colors)
    for at, row in enumerate(shown):
        label = f"{row['median']:.0f}" + (f", {row['ratio']} x" if row["ratio"] != "-" else "")
        axes.annotate(label, (row["most"], at), (6, 0), textcoords="offset points", va="center")
        if row["ratio"] != "-":
            least = REQUIRED[row["what"]][1] * row["median"] / float(row["ratio"])
            axes.plot([least, least], [at - 0.4, at + 0.4], color="#d62728", linewidth=2)
    axes.plot([], [], color="#d62728", linewidth=2, label="required")
    axes.invert_yaxis()
    axes.set_xlabel("images/s; one worker: of CPU time")
    axes.margins(x=0.25)
    axes.legend(loc="upper right")
    save_axes(path, figure, axes, title)


def run(options: Options) -> None:
    """Runs the experiment, prints the table and writes the files."""
    require_positive(repeats=options.repeats, images=options.images)
    if not shutil.which(options.peer):
        raise ValueError(f"peer={options.peer}: no such program; expected a Python")
    if options.quick:
        options = replace(options, repeats=5, images=64)
    announce(f"{os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.1f}", options.out)
    with TemporaryDirectory() as folder, start_peer(options.peer) as started:
        assert started.stdout
        said = started.stdout.readline().strip()
        print(f"peer: {said or f'left out, {options.peer} cannot import torchvision'}")
        scratch, peer = Path(folder).resolve(), started if said else None
        os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
        files = make_images(scratch / "images", options.images)
        pack_split(files, scratch / "packed", PackOptions(PACKED_SIDE, QUALITY, SHARD_MB, 2))
        packed = open_shards(scratch / "packed")
        sizes = [np.mean([len(kind.read(index).data) for index in range(len(kind))]) / 1e3 for kind in (files, packed)]
        times = time_all(peer, files, packed, options.repeats)
        rows = make_rows(times, time_starts(peer, scratch, files, min(options.repeats, 5)))
    write_rows(options.out / "input_pipeline.csv", rows)
    title = f"{options.images} JPEGs of {sizes[0]:.0f} kB, packed {sizes[1]:.0f} kB, {options.repeats} turns"
    draw(options.out / "input_pipeline.png", title, rows)
    print(f"{title}; scaled: measured of {WALKED_FILES:,} empty files; what files hold is in the page cache")


if __name__ == "__main__":
    main(run, Options)
