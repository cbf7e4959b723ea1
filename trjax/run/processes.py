"""The processes of one run: how they find each other, what they compare before they train, how they end together."""

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_HEARTBEAT_SECONDS = 30  # a process that is silent for longer is taken for dead, and all others end
_POLL_MS, _PATIENCE_SECONDS = 500, 900
_FAREWELL_MS = 10_000
_MPI_SIZE, _MPI_RANK = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
_CLUSTERS = {"SLURM_STEP_NODELIST": "SLURM_STEP_NUM_TASKS", "OMPI_MCA_orte_hnp_uri": _MPI_SIZE}
"""What is set where a launcher that JAX knows has started this process, and what holds the number of processes."""
_exchanges = count()  # all processes exchange the same things in the same order
_KUBERNETES = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")


@dataclass(frozen=True)
class Processes:
    """How this process finds the others of its run; by itself under SLURM, Open MPI and Kubernetes."""

    coordinator: str = ""
    """HOST:PORT of process 0, as all can reach it; with it go the other two."""
    num_processes: int = 0
    """Processes of the run."""
    process_id: int = -1
    """This one's place among them, from 0."""


def _check(given: Processes) -> None:
    host, _, port = given.coordinator.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"coordinator={given.coordinator!r}: write HOST:PORT, with --num-processes and --process-id")
    if not 0 <= given.process_id < given.num_processes:
        raise ValueError(
            f"process_id={given.process_id} with num_processes={given.num_processes}: must be from 0 to one less"
        )


def _in_cluster() -> bool:
    if all(name in os.environ for name in _KUBERNETES):
        return True
    counts = [os.environ.get(count, "1") for name, count in _CLUSTERS.items() if name in os.environ]
    return any(count.isdigit() and int(count) > 1 for count in counts)


def join_processes(given: Processes) -> None:
    """Finds the other processes of the run, if there are any; before JAX's first use.

    Raises:
        ValueError: the options do not fit together, or the others are not to be found.
    """
    by_hand = given != Processes()
    if by_hand:
        _check(given)
    elif not _in_cluster():
        if os.environ.get(_MPI_SIZE, "1") != "1":  # from version 5 on it no longer says where process 0 is
            raise ValueError(
                f"started by Open MPI as one of {os.environ[_MPI_SIZE]} processes that JAX cannot find: pass "
                f'--coordinator HOST:PORT --num-processes "${_MPI_SIZE}" --process-id "${_MPI_RANK}"'
            )
        return
    options: dict[str, Any] = {}
    if by_hand:
        options = {
            "coordinator_address": given.coordinator,
            "num_processes": given.num_processes,
            "process_id": given.process_id,
            "cluster_detection_method": "deactivate",
        }
    try:
        jax.distributed.initialize(
            **options,
            initialization_timeout=300,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        where = f"coordinator={given.coordinator}" if by_hand else "started by a launcher"
        raise ValueError(f"{where}: the other processes are not to be found ({reason})") from error


def _client() -> Any:
    """Returns what reads and writes the few words that processes exchange; None where there is one process.

    JAX has no public name for it; every library that needs it goes this way.
    """
    from jax._src import distributed

    return distributed.global_state.client


def process_index() -> int:
    """Returns this process's place among those of the run; does not start a platform."""
    from jax._src import distributed

    return distributed.global_state.process_id


def _count() -> int:
    from jax._src import distributed

    return distributed.global_state.num_processes or 1


def exchange(topic: str, text: str) -> list[str]:
    """Returns what every process says on a topic, in the order of the processes; all of them must ask for it.

    Raises:
        ValueError: another process has failed; says which, and why.
        TimeoutError: one says nothing for a quarter of an hour; says which.
    """
    client = _client()
    if client is None:
        return [text]
    folder = f"trjax/said/{next(_exchanges)}-{topic}"
    if process_index():
        client.key_value_set(f"{folder}/{process_index()}", text)
        return json.loads(_hear(client, f"{folder}/all", 0))
    said = [text, *(_hear(client, f"{folder}/{process}", process) for process in range(1, _count()))]
    client.key_value_set(f"{folder}/all", json.dumps(said))  # so that not everyone asks everyone
    return said


def find_hosts() -> list[str]:
    """Returns the name of every process's host."""
    return exchange("host", socket.gethostname())


def _hear(client: Any, key: str, speaker: int) -> str:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        for name, message in client.key_value_dir_get("trjax/failed/"):
            raise ValueError(f"process {name.rpartition('/')[2]} has failed: {message}")
        with suppress(jax.errors.JaxRuntimeError):  # not there yet
            return client.blocking_key_value_get(key, _POLL_MS)
    raise TimeoutError(f"process {speaker} has said nothing for {_PATIENCE_SECONDS} s: it hangs")


def announce_failure(message: str) -> None:
    """Tells the other processes why this one ends before training, and waits until they know, for some seconds."""
    client = _client()
    if client is None:
        return
    with suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(f"trjax/failed/{process_index()}", message)
    with suppress(jax.errors.JaxRuntimeError):
        client.wait_at_barrier("trjax/farewell", _FAREWELL_MS)


def find_differing(said: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns where what the processes say, by name, is not what process 0 says.

    >>> find_differing([{"seed": 1}, {"seed": 2}])
    ['seed is 2 on process 1 and 1 on process 0']
    """
    return [
        f"{name} is {own.get(name)!r} on process {process} and {said[0].get(name)!r} on process 0"
        for process, own in enumerate(said)
        for name in sorted(own.keys() | said[0].keys())
        if own.get(name) != said[0].get(name)
    ]


def require_same(topic: str, facts: Mapping[str, Any]) -> None:
    """Compares facts by name with those of process 0.

    Raises:
        ValueError: they differ; says on which process, and from what. All processes raise the same.
    """
    said = exchange(topic, json.dumps(facts, default=str))
    if differing := find_differing([json.loads(text) for text in said]):
        raise ValueError(f"the processes of a run must agree: {'; '.join(differing)}")


def digest_code() -> str:
    """Returns what tells one version of this package's code from another."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*")):
        if path.suffix in (".py", ".npz"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def broadcast(data: bytes) -> bytes:
    """Returns the bytes of process 0 on every process.

    Raises:
        ValueError: what arrived is not what was sent.
    """
    size, digest = exchange("broadcast", f"{len(data)} {hashlib.sha256(data).hexdigest()}")[0].split()
    if _count() == 1:
        return data
    padded = np.zeros(-(-int(size) // 4), np.uint32)  # its sum with zeros keeps every bit
    if process_index() == 0:
        padded.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes()[: int(size)]
    arrived = exchange("received", hashlib.sha256(received).hexdigest())
    if damaged := [str(process) for process, its in enumerate(arrived) if its != digest]:
        raise ValueError(f"the state did not arrive as process 0 sent it on process {', '.join(damaged)}")
    return received


def leave(code: int) -> None:
    """Ends this process at once if it failed and there are others: they may be dead, and an orderly end would wait."""
    if code and _client() is not None:
        if process_index() == 0:
            time.sleep(1)  # it holds what the others still read
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
