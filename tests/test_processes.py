from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from trjax.mesh import SPLIT, SPLIT_MICRO, make_mesh, own_rows, place
from trjax.run import processes
from trjax.run.processes import Processes, broadcast, exchange, find_differing, join_processes, require_same

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Processes("here", 2, 0), r"coordinator='here': write HOST:PORT"),
        (Processes(":80", 2, 0), r"coordinator=':80': write HOST:PORT"),
        (Processes("here:99999", 2, 0), "write HOST:PORT"),
        (Processes("", 2, 0), r"coordinator='': write HOST:PORT, with --num-processes and --process-id"),
        (Processes("here:80"), r"process_id=-1 with num_processes=0: must be from 0 to one less"),
        (Processes("here:80", 2, 2), r"process_id=2 with num_processes=2"),
    ],
)
def test_options_that_do_not_fit_are_named(given: Processes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        join_processes(given)


def test_a_launcher_that_jax_does_not_find_is_no_silent_run_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")  # Open MPI 5
    with pytest.raises(ValueError, match=r"one of 4 processes that JAX cannot find: pass --coordinator HOST:PORT"):
        join_processes(Processes())


@pytest.mark.parametrize(
    ("environment", "joins"),
    [
        ({}, False),
        ({"SLURM_STEP_NODELIST": "a,b", "SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"SLURM_STEP_NODELIST": "a", "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_STEP_NODELIST": "a", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}, False),  # a shell in a job
        ({"SLURM_NTASKS": "2"}, False),  # a batch script that runs Python without srun
        ({"OMPI_MCA_orte_hnp_uri": "1.0;tcp://h:1", "OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"KUBERNETES_SERVICE_HOST": "h"}, False),  # any pod
        ({"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "0"}, True),
    ],
)
def test_launchers_are_recognised(environment: dict[str, str], joins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: calls.append(options))
    join_processes(Processes())
    assert bool(calls) == joins
    assert all(options["coordinator_address"] is None for options in calls)  # JAX asks the launcher


def test_others_that_are_not_to_be_found_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("DEADLINE_EXCEEDED: waited\nlong")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    with pytest.raises(ValueError, match=r"coordinator=h:80: the other processes cannot be found \(DEADLINE_EXC.*"):
        join_processes(Processes("h:80", 2, 1))


def test_what_differs_is_reported_by_process() -> None:
    facts: list[dict[str, Any]] = [
        {"seed": 1, "code": "a"},
        {"seed": 1, "code": "a"},
        {"seed": 2, "code": "a"},
        {"seed": 1},
    ]
    assert find_differing(facts) == [
        "seed is 2 on process 2 and 1 on process 0",
        "code is None on process 3 and 'a' on process 0",
    ]


def test_alone_everybody_agrees() -> None:
    require_same("facts", {"seed": 1})
    assert exchange("topic", "text") == ["text"]
    assert broadcast(b"abc") == b"abc"
    assert processes.process_index() == 0


def test_the_rows_of_a_process_are_those_of_its_devices() -> None:
    mesh = make_mesh("0-7")
    np.testing.assert_array_equal(own_rows(mesh, (24,), SPLIT), np.arange(24))
    half = Mesh(mesh.devices[:, 4:], mesh.axis_names)  # all of it is here, too
    np.testing.assert_array_equal(own_rows(half, (2, 8), SPLIT_MICRO), np.arange(16))
    placed = place(mesh, SPLIT_MICRO, np.arange(48).reshape(3, 16))
    np.testing.assert_array_equal(placed.addressable_shards[1].data, [[2, 3], [18, 19], [34, 35]])
