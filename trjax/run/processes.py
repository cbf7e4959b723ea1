"""The processes of one run: how they find each other, compare facts before they train, and end together."""

import hashlib
import json
import os
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

_HEARTBEAT_SECONDS = 30  # a process that sends nothing for longer counts as dead, and all others end
_POLL_MS, _TIMEOUT_SECONDS = 500, 900
_EXIT_MS = 10_000
_MPI_SIZE, _MPI_RANK = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
_CLUSTERS = {"SLURM_STEP_NODELIST": "SLURM_STEP_NUM_TASKS", "OMPI_MCA_orte_hnp_uri": _MPI_SIZE}
"""What is set where a launcher that JAX knows has started this process, and what holds the number of processes."""
_exchanges = count()  # all processes exchange the same things in the same order
_KUBERNETES = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")


@dataclass(frozen=True)
class Processes:
    """How this process finds the others of its run; by itself under SLURM, Open MPI and Kubernetes."""

    coordinator: str = ""
    """HOST:PORT at which all processes reach process 0; needs the other two options."""
    num_processes: int = 0
    """Number of processes of the run."""
    process_id: int = -1
    """Index of this process, from 0."""


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
        ValueError: the options do not fit together, or the others cannot be found.
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
    try:
        jax.distributed.initialize(
            coordinator_address=given.coordinator or None,
            num_processes=given.num_processes or None,
            process_id=given.process_id if by_hand else None,
            cluster_detection_method="deactivate" if by_hand else None,
            initialization_timeout=300,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        where = f"coordinator={given.coordinator}" if by_hand else "started by a launcher"
        raise ValueError(f"{where}: the other processes cannot be found ({reason})") from error


def _connection() -> Any:
    """Returns JAX's connection to the other processes; its `client` is None if there is one process.

    JAX has no public name for it; every library that needs it imports this one.
    """
    from jax._src import distributed

    return distributed.global_state


def process_index() -> int:
    """Returns this process's place among those of the run; does not start a platform."""
    return _connection().process_id


def exchange(topic: str, text: str) -> list[str]:
    """Returns the texts of all processes on a topic, by process; all of them must call it.

    Raises:
        ValueError: another process has failed; says which, and why.
        TimeoutError: one does not respond for a quarter of an hour; says which.
    """
    connection = _connection()
    client, index = connection.client, connection.process_id
    if client is None:
        return [text]
    folder = f"trjax/exchange/{next(_exchanges)}-{topic}"
    if index:
        client.key_value_set(f"{folder}/{index}", text)
        return json.loads(_wait_for_key(client, f"{folder}/all", 0))
    others = range(1, connection.num_processes)
    texts = [text, *(_wait_for_key(client, f"{folder}/{process}", process) for process in others)]
    client.key_value_set(f"{folder}/all", json.dumps(texts))  # so that not everyone asks everyone
    return texts


def _wait_for_key(client: Any, key: str, process: int) -> str:
    """Returns the value that a process sets."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        for name, message in client.key_value_dir_get("trjax/failed/"):
            raise ValueError(f"process {name.rpartition('/')[2]} has failed: {message}")
        with suppress(jax.errors.JaxRuntimeError):  # not there yet
            return client.blocking_key_value_get(key, _POLL_MS)
    raise TimeoutError(f"process {process} has not responded for {_TIMEOUT_SECONDS} s")


def report_failure(message: str) -> None:
    """Reports to the other processes why this one ends before training, and waits some seconds until they know."""
    if (client := _connection().client) is None:
        return
    with suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(f"trjax/failed/{process_index()}", message)
    with suppress(jax.errors.JaxRuntimeError):
        client.wait_at_barrier("trjax/exit", _EXIT_MS)


def find_differing(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the facts, by name, in which processes differ from process 0.

    >>> find_differing([{"seed": 1}, {"seed": 2}])
    ['seed is 2 on process 1 and 1 on process 0']
    """
    return [
        f"{name} is {own.get(name)!r} on process {process} and {facts[0].get(name)!r} on process 0"
        for process, own in enumerate(facts)
        for name in sorted(own.keys() | facts[0].keys())
        if own.get(name) != facts[0].get(name)
    ]


def require_same(topic: str, facts: Mapping[str, Any]) -> None:
    """Compares facts by name with those of process 0.

    Raises:
        ValueError: they differ; says on which process, and from what. All processes raise the same.
    """
    texts = exchange(topic, json.dumps(facts, default=str))
    if differing := find_differing([json.loads(text) for text in texts]):
        raise ValueError(f"the processes of a run must agree: {'; '.join(differing)}")


def digest_code() -> str:
    """Returns a digest of this package's code."""
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
    if _connection().client is None:
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
    if code and _connection().client is not None:
        if process_index() == 0:
            time.sleep(1)  # it holds what the others still read
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
