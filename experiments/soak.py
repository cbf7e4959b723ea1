"""Does a run that is killed at any moment, and started again, end as if nothing had happened?

Each run of a small job on the digits is sent a signal at a random moment from its first step on, in steps,
evaluations and savings, then
started again until it ends. Its parameters, statistics and momentum must then be those of the undisturbed run, to the
bit, and every start must go on from the newest checkpoint there is.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
from matplotlib.figure import Figure
from report import Common, Row, announce, main, progress, save_axes, write_rows
from safetensors.numpy import load_file

from trjax.launch import free_port

JOB = "--platform cpu --model.width 4 --epochs 8 --optim.warmup-epochs 1 --save-every 4 --bn sync --log-every 1"
JOB += " --watchdog-seconds 100"
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM}
COLORS = {"steps": "#1f77b4", "evaluation": "#2ca02c", "saving": "#d62728", "the end": "#7f7f7f"}
STEPS_PER_EPOCH, LAST_STEP = 15, 120
TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Options(Common):
    """Kill runs at random moments, resume them, and compare their final state with that of an undisturbed run."""

    runs: int = 100
    """Number of runs."""
    signal: Literal["kill", "term"] = "kill"
    """Signal to send: SIGKILL, or SIGTERM, which lets a run save first."""
    processes: int = 1
    """Processes of each run, which share two devices; one of them gets the signal."""
    seed: int = 0
    """Seed of the random moments."""
    quick: bool = False
    """Kill one run only."""


def _start(workdir: Path, processes: int, cache: Path) -> list[subprocess.Popen[str]]:
    """Starts the job's processes; compiled programs are kept, so that only the first start compiles."""
    port = free_port()
    caching = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = os.environ | caching | {"PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "trjax.train", *JOB.split(), "--workdir", str(workdir)]
    command += ["--devices", "0-1" if processes == 1 else "0"]
    children = []
    for index in range(processes):
        found_by = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(processes), "--process-id", str(index)]
        log = (workdir.parent / f"{workdir.name}.{index}.log").open("a", encoding="utf-8")
        own = command + (found_by if processes > 1 else [])
        with log:
            children.append(subprocess.Popen(own, stdout=log, stderr=subprocess.STDOUT, text=True, env=environment))
    return children


def _log(workdir: Path) -> str:
    return (workdir.parent / f"{workdir.name}.0.log").read_text(encoding="utf-8")


def _finish(workdir: Path, children: Sequence[subprocess.Popen[str]]) -> list[int]:
    """Returns the exit codes of the processes.

    Raises:
        ValueError: one does not end; says what it said last.
    """
    try:
        return [child.wait(TIMEOUT_SECONDS) for child in children]
    except subprocess.TimeoutExpired as error:
        logs = sorted(workdir.parent.glob(f"{workdir.name}.*.log"))
        said = "\n".join(f"{log.name}: {log.read_text(encoding='utf-8')[-2000:]}" for log in logs)
        raise ValueError(f"a process did not end within {TIMEOUT_SECONDS} s:\n{said}") from error
    finally:
        for child in children:
            child.kill()


def _await_step(workdir: Path, children: Sequence[subprocess.Popen[str]]) -> None:
    """Returns when the first step is done, or a process has ended."""
    records, deadline = workdir / "metrics.jsonl", time.monotonic() + TIMEOUT_SECONDS
    while not (records.exists() and records.stat().st_size) and time.monotonic() < deadline:
        if any(child.poll() is not None for child in children):
            return
        time.sleep(0.005)


def undisturbed(folder: Path, processes: int) -> tuple[dict[str, np.ndarray], float]:
    """Returns what the job comes to, and most of the seconds from its first step to its end.

    Raises:
        ValueError: it fails.
    """
    for name in ("warm", "whole"):  # the first one compiles
        children = _start(folder / name, processes, folder / "cache")
        _await_step(folder / name, children)
        began = time.monotonic()
        if any(_finish(folder / name, children)):
            raise ValueError(f"the undisturbed run failed: {_log(folder / name)}")
    return final(folder / "whole"), 0.8 * (time.monotonic() - began)


def newest(workdir: Path) -> int:
    """Returns the step of the newest checkpoint, 0 if there is none."""
    return max(
        (int(path.stem) for path in (workdir / "checkpoints").glob("*.safetensors") if path.stem.isdigit()), default=0
    )


def final(workdir: Path) -> dict[str, np.ndarray]:
    """Returns the arrays in the newest checkpoint, by name."""
    return load_file(workdir / "checkpoints" / f"{newest(workdir)}.safetensors")


def _moment(workdir: Path) -> str:
    """Returns what a run was at when it was killed, by what it left behind."""
    if any((workdir / "checkpoints").glob("*.partial")):
        return "saving"
    if newest(workdir) == LAST_STEP:
        return "the end"
    records = workdir / "metrics.jsonl"
    last = records.read_text(encoding="utf-8").splitlines()[-1:] if records.exists() else []
    found = re.search(r'"train".*"step": (\d+)', "".join(last))
    return "evaluation" if found and int(found.group(1)) % STEPS_PER_EPOCH == 0 else "steps"


def disturb(folder: Path, name: str, options: Options, whole: dict[str, np.ndarray], loop_seconds: float) -> Row:
    """Sends one run its signal, resumes it, and returns the row of what came of it; a run that ends first is no run."""
    workdir, chance = folder / name, random.Random(f"{options.seed} {name}")
    codes = [0]
    while not any(codes):
        shutil.rmtree(workdir, ignore_errors=True)
        delay = chance.uniform(0.0, loop_seconds)
        children = _start(workdir, options.processes, folder / "cache")
        _await_step(workdir, children)
        time.sleep(delay)
        children[chance.randrange(options.processes)].send_signal(SIGNALS[options.signal])
        codes = _finish(workdir, children)
    moment, at, before = _moment(workdir), newest(workdir), len(_log(workdir))
    ended = codes + _finish(workdir, _start(workdir, options.processes, folder / "cache"))
    said = re.search(r"resumed at step (\d+)", _log(workdir)[before:])
    resumed = int(said.group(1)) if said else 0
    found = final(workdir)
    equal = found.keys() == whole.keys() and all(found[leaf].tobytes() == whole[leaf].tobytes() for leaf in whole)
    lost = resumed < at or "its digest" in _log(workdir)
    row = {"run": name, "after s": round(delay, 2), "during": moment, "codes": " ".join(map(str, ended))}
    return row | {"newest checkpoint": at, "resumed at": resumed, "lost": int(lost), "equal": int(equal)}


def draw(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draws where each run went on, over the moment of its signal."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for moment, color in COLORS.items():
        some = [row for row in rows if row["during"] == moment]
        if some:
            points = zip(*((row["after s"], row["resumed at"]) for row in some), strict=True)
            axes.plot(*points, "o", color=color, markersize=5, label=f"{moment}: {len(some)}")
    axes.set_xlabel("signal after (s)")
    axes.set_ylabel("resumed at step")
    axes.grid(alpha=0.3)
    axes.legend(title="signal during", loc="upper left")
    save_axes(path, figure, axes, title)


def run(options: Options) -> None:
    """Runs the experiment, prints the table and writes the files; raises ValueError if a run did not survive."""
    if options.runs < 1 or options.processes not in (1, 2):
        raise ValueError(f"runs={options.runs} with processes={options.processes}: at least 1, with 1 or 2 processes")
    announce(f"{options.processes} process(es), 2 CPU devices, {os.cpu_count()} CPU cores", options.out)
    count = 1 if options.quick else options.runs
    rows = []
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        whole, loop_seconds = undisturbed(folder, options.processes)
        for index in range(count):
            rows.append(disturb(folder, f"run{index}", options, whole, loop_seconds))
            progress(f"{index + 1}/{count}: {rows[-1]}")
    name = f"soak_{options.signal}_{options.processes}"
    write_rows(options.out / f"{name}.csv", rows)
    equal, lost = sum(row["equal"] for row in rows), sum(row["lost"] for row in rows)
    title = f"SIG{options.signal.upper()}, {options.processes} process(es): {equal} of {count} runs end bitwise equal"
    draw(options.out / f"{name}.png", title, rows)
    print(f"{title}; {lost} checkpoints lost")
    if equal < count or lost:
        raise ValueError("a run did not survive")


if __name__ == "__main__":
    main(run, Options)
