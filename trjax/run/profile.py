"""A profile of some steps of a run: taken by JAX, and read at once for what the time went to."""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import jax
from jax.profiler import ProfileData, ProfileOptions

from trjax.text import format_table
from trjax.xla.hlo import parse_module
from trjax.xla.operations import list_operations

Interval = tuple[float, float]
"""Start and end."""
INPUT = "trjax: input"
"""Name of what the host does to bring a batch to the devices."""
GRAPH_CALLS = ("cuGraphLaunch", "command_buffer::update")
"""Of the host. An update: some buffer lies elsewhere than last time."""
UNNAMED = "collective"
"""Kernels of a CUDA graph do not tell which instruction they belong to."""
_COLLECTIVE = re.compile("nccl|psum|ppermute|all.?(reduce|gather|to.?all)|reduce.?scatter|collective.?permute", re.I)
_MOST_KERNELS = 10


@dataclass(frozen=True)
class Event:
    """What a device did.

    Attributes:
        device: which.
        start: nanoseconds.
        end: nanoseconds.
        name: of its instruction, or of the kernel if that does not tell.
        group: what a collective reduces; empty for all else.
        in_graph: a CUDA graph launched it.
    """

    device: int
    start: float
    end: float
    name: str = ""
    group: str = ""
    in_graph: bool = False

    @property
    def interval(self) -> Interval:
        """When it was."""
        return self.start, self.end


@dataclass(frozen=True)
class Trace:
    """What was read from a profile.

    Attributes:
        events: of the devices.
        calls: how often the host launched CUDA graphs, and updated them.
        inputs: when the host was at work on a batch.
    """

    events: tuple[Event, ...]
    calls: Counter[str]
    inputs: tuple[Interval, ...]


@dataclass(frozen=True)
class Kernel:
    """One instruction, or kernel, in the mean step of one device.

    Attributes:
        name: of it.
        count: of its runs.
        ms: that they take.
    """

    name: str
    count: float
    ms: float


@dataclass(frozen=True)
class Parts:
    """What the mean step of one device is made of, in milliseconds; the first four times add up to the step.

    Attributes:
        kernels: all but collectives, by falling time.
        computing: some kernel runs.
        exposed: a collective runs, and no kernel.
        waiting: nothing runs, and the host is at work on a batch.
        idle: nothing runs, whatever else the host does.
        communication: a collective runs.
    """

    kernels: tuple[Kernel, ...]
    computing: float
    exposed: float
    waiting: float
    idle: float
    communication: float

    @property
    def step(self) -> float:
        """All of the profile, divided by its steps."""
        return self.computing + self.exposed + self.waiting + self.idle


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union of intervals as disjoint ones, in order.

    >>> merge([(4, 6), (0, 2), (1, 3)])
    [(0, 3), (4, 6)]
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Returns the length of the union of intervals."""
    return sum(end - start for start, end in merge(intervals))


def find_gaps(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns what lies between the first and the last interval and in none."""
    return [(before[1], after[0]) for before, after in pairwise(merge(intervals))]


def read_trace(data: ProfileData, groups: Mapping[str, str]) -> Trace:
    """Reads a profile.

    A GPU has a plane of its own, with a line for each stream. CPU devices run in threads of the host, whose events
    tell the device and the instruction.

    Args:
        data: the profile.
        groups: what instructions reduce; of a collective that is not among them, `UNNAMED`.
    """
    on_gpu, on_cpu, calls, inputs = [], [], Counter[str](), []
    for plane in data.planes:
        gpu = re.fullmatch(r"/device:GPU:(\d+)", plane.name)
        for line in plane.lines:
            for event in line.events:
                stats = {name: value for name, value in event.stats if name}
                interval = event.start_ns, event.start_ns + event.duration_ns
                instruction = str(stats.get("hlo_op", ""))
                group = groups.get(instruction, UNNAMED if _COLLECTIVE.search(event.name) else "")
                if gpu and line.name.startswith("Stream #"):
                    name, in_graph = instruction or event.name, "cuda_graph_id" in stats
                    on_gpu.append(Event(int(gpu[1]), *interval, name, group, in_graph))
                elif instruction and "device_ordinal" in stats:
                    on_cpu.append(Event(int(stats["device_ordinal"]), *interval, instruction, group))
                elif event.name == INPUT:
                    inputs.append(interval)
                elif event.name.startswith(GRAPH_CALLS):
                    calls[event.name.partition(" (")[0]] += 1
    return Trace(tuple(on_gpu or on_cpu), calls, tuple(inputs))


def divide(trace: Trace, num_steps: int) -> Parts:
    """Returns what the mean step of one device is made of.

    Raises:
        ValueError: no device did anything.
    """
    devices = sorted({event.device for event in trace.events})
    if not devices:
        raise ValueError("the profile holds no work of a device: is CUPTI installed, and may this user profile?")
    start, end = min(event.start for event in trace.events), max(event.end for event in trace.events)
    computing = communication = busy = late = 0.0
    for device in devices:
        own = [event for event in trace.events if event.device == device]
        computing += length(event.interval for event in own if not event.group)
        communication += length(event.interval for event in own if event.group)
        busy += length(event.interval for event in own)
        gaps = find_gaps([(start, start), *(event.interval for event in own), (end, end)])
        late += length(gaps) + length(trace.inputs) - length([*gaps, *trace.inputs])
    turns = len(devices) * num_steps
    times = defaultdict[str, list[float]](list)
    for event in trace.events:
        if not event.group:
            times[event.name].append(event.end - event.start)
    found = (Kernel(name, len(all_ns) / turns, sum(all_ns) / turns / 1e6) for name, all_ns in times.items())
    kernels = tuple(sorted(found, key=lambda kernel: -kernel.ms))
    idle = (end - start) * len(devices) - busy - late
    parts = computing, busy - computing, late, idle, communication
    return Parts(kernels, *(part / turns / 1e6 for part in parts))


def format_parts(parts: Parts, sources: Mapping[str, str]) -> str:
    """Returns tables of the step and of its kernels.

    Args:
        parts: of a profile.
        sources: where instructions come from.
    """
    named = [("computing", parts.computing), ("exposed communication", parts.exposed)]
    named += [("waiting for input", parts.waiting), ("idle otherwise", parts.idle), ("step", parts.step)]
    rows = [[name, round(ms, 3), round(100 * ms / parts.step, 1)] for name, ms in named]
    table = format_table(["mean step of a device", "ms", "%"], rows)
    kernels = []
    for kernel in parts.kernels[:_MOST_KERNELS]:
        numbers = [round(kernel.count, 1), round(kernel.ms, 3), round(100 * kernel.ms / parts.step, 1)]
        kernels.append([kernel.name[:40], *numbers, sources.get(kernel.name, "")[-60:]])
    hidden = f"communication: {parts.communication:.3f} ms, {parts.communication - parts.exposed:.3f} of it hidden"
    return f"{table}\n{hidden}\n\n{format_table(['kernel', 'runs', 'ms', '%', 'comes from'], kernels)}"


class Profiler:
    """Takes the profile of a run's steps, once."""

    def __init__(self, steps: tuple[int, int], folder: Path, say: Callable[[str], None]) -> None:
        """Prepares it.

        Args:
            steps: the first and the last one, from 1; (0, 0): none. What is dispatched together is profiled together,
                and the end of an epoch ends it.
            folder: for the profile, that Perfetto and XProf open.
            say: prints a line.
        """
        (self._first, self._last), self._folder, self._say = steps, folder, say
        self._state: Literal["waiting", "running", "done"] = "waiting" if self._first else "done"

    def begin(self, step: int, count: int, unread: Any) -> float:
        """Starts if one of the next steps is among them, and returns the seconds that this took.

        Args:
            step: the number of steps done.
            count: how many are dispatched together.
            unread: results that the devices still work on.
        """
        if self._state != "waiting" or step + count < self._first or step + 1 > self._last:
            return 0.0
        jax.block_until_ready(unread)
        began, options, self._begun = time.perf_counter(), ProfileOptions(), step + 1
        options.python_tracer_level = 0  # tracing Python would slow down the host, which launches the kernels
        try:
            self._folder.mkdir(exist_ok=True)
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._state = "running"
        except (OSError, RuntimeError) as error:
            self._state = "done"
            self._say(f"warning: no profile: {error}")
        return time.perf_counter() - began

    def end(self, step: int, outcome: Any, program: Any, whole: bool = False) -> float:
        """Stops after the last step, prints where the time went, and returns the seconds that this took.

        Args:
            step: that was the last to be dispatched.
            outcome: what it comes to, on the devices.
            program: that ran, compiled.
            whole: stop in any case.
        """
        if self._state != "running" or (step < self._last and not whole):
            return 0.0
        jax.block_until_ready(outcome)
        began, self._state = time.perf_counter(), "done"
        try:
            jax.profiler.stop_trace()
            file = max(self._folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
            operations = list_operations(parse_module(program.as_text()))
            by_name = {operation.name.partition("@")[0]: operation for operation in operations}  # those of a loop, once
            groups = {name: operation.collective for name, operation in by_name.items() if operation.collective}
            parts = divide(read_trace(ProfileData.from_file(str(file)), groups), step + 1 - self._begun)
            sources = {name: operation.source for name, operation in by_name.items()}
            self._say(f"profile of steps {self._begun} to {step}, in {file.parent}\n\n{format_parts(parts, sources)}\n")
        except (OSError, ValueError, RuntimeError) as error:
            self._say(f"warning: no profile of steps {self._begun} to {step}: {error}")
        return time.perf_counter() - began

    def close(self) -> None:
        """Gives up a profile that was begun and not ended, and says so if there was none."""
        if self._state == "waiting":
            self._say(f"warning: no profile: none of the steps {self._first} to {self._last} was done")
        elif self._state == "running":
            jax.profiler.stop_trace()
        self._state = "done"
