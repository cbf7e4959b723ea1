import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trjax.cost.algorithms import Link
from trjax.cost.collectives import predict_algorithms
from trjax.cost.machines import Machine, Topology
from trjax.cost.targets import TARGETS
from trjax.explain.__main__ import main
from trjax.explain.cost import describe_costs, find_crossovers

pytestmark = pytest.mark.fast

PURE = ["--latency-us", "0", "--nvlink-latency-us", "0", "--call-us", "0"]  # bytes alone take time
ISSUE = ["--bytes", "1.2e9", "--ranks", "64", "--link-gbytes", "180"]
NAMES = ["parameter server", "ring", "binary tree", "double binary tree"]
NAMES += ["hierarchical, rings", "hierarchical, trees", "ZeRO-1, ZeRO-2", "ZeRO-3, FSDP"]


def tables(*arguments: str) -> list[dict[str, list[str]]]:
    """Returns the tables of the output, each as cells by the first column."""
    blocks = describe_costs(arguments).split("\n\n")
    lines = [[re.split(r"  +", line.strip()) for line in block.splitlines()] for block in blocks]
    return [{first: rest for first, *rest in table[1:]} for table in lines if len(table) > 1 and len(table[0]) > 1]


def test_all_algorithms_of_64_ranks() -> None:
    costs, _ = tables(*ISSUE, "--nvlink-gbytes", "350", *PURE)
    assert list(costs) == NAMES
    assert costs["parameter server"] == ["1,200,000,000", "2", "1", "853.333"]  # 2 * 64 * 1.2 / 180
    assert costs["ring"] == ["2,362,500,000", "126", "1", "13.125"]
    assert costs["binary tree"] == ["3,600,000,000", "12", "1", "80.000"]
    assert costs["double binary tree"] == ["2,400,000,000", "12", "1", "13.333"]  # the ideal: 2.4 GB / 180 GB/s
    # in the host 2 * 7/8 * 1.2 / 350 = 6 ms, across 2 * 7/8 * 0.15 / 180 = 1.458 or 0.3 / 180 = 1.667 ms
    assert costs["hierarchical, rings"] == ["2,362,500,000", "28", "1", "7.458"]
    assert costs["hierarchical, trees"] == ["2,400,000,000", "20", "1", "7.667"]
    assert costs["ZeRO-1, ZeRO-2"] == ["2,362,500,000", "126", "2", "13.125"]
    assert costs["ZeRO-3, FSDP"] == ["3,543,750,000", "189", "3", "19.688"]


def test_latency_counts_for_every_step_and_a_call_for_every_call() -> None:
    quiet, _ = tables(*ISSUE, "--nvlink-latency-us", "0", "--latency-us", "0", "--call-us", "0")
    found, _ = tables(*ISSUE, "--nvlink-latency-us", "0", "--latency-us", "1000", "--call-us", "100")
    added = {name: round(float(found[name][3]) - float(quiet[name][3]), 2) for name in NAMES}
    assert added == dict(zip(NAMES, [2.1, 126.1, 12.1, 12.1, 14.1, 6.1, 126.2, 189.3], strict=True))


def test_one_gib_in_one_host() -> None:
    # the given link is the slowest: with one host, that between its GPUs
    costs, _ = tables("--bytes", str(2**30), "--ranks", "8", "--link-gbytes", str(25 * 2**30 / 1e9), *PURE)
    assert costs["ring"] == ["1,879,048,192", "14", "1", "70.000"]
    assert costs["hierarchical, rings"] == costs["ring"]


def test_channels_and_efficiency_give_the_published_rate() -> None:
    ports = ["--bytes", "1.2e9", "--ranks", "64", "--link-gbytes", "25", "--efficiency", "0.9", *PURE]
    assert tables(*ports, "--channels", "8")[0]["double binary tree"][-1] == "13.333"
    assert tables(*ports, "--channels", "1")[0]["double binary tree"][-1] == "106.667"
    rings = [tables(*ports, "--channels", channels)[0]["hierarchical, rings"] for channels in ("1", "8")]
    assert rings[0] == rings[1]  # it uses all links anyway


def test_rates_left_out_are_the_data_sheets() -> None:
    assert "1x8: 351 GB/s and 1 us a message in a host, 40 GB/s" in describe_costs(["--ranks", "8"])
    assert "8x8: 234 GB/s and 1 us a message in a host, 20 GB/s" in describe_costs(["--target", "a100"])
    assert "45 GB/s a GPU" in describe_costs(["--efficiency", "0.9"])
    assert "1x4: 405 GB/s" in describe_costs(["--ranks", "4", "--efficiency", "0.9"])
    assert "1x4: 100 GB/s" in describe_costs(["--ranks", "4", "--nvlink-gbytes", "100"])


def test_where_each_wins_over_bytes() -> None:
    _, wins = tables("--ranks", "64", "--gpus-per-host", "1", "--link-gbytes", "25", "--latency-us", "5")
    # server and trees: 2 a + 128 S/B = 12 a + 2 S/B; trees and ring: S = a B N (N - 1 - log2 N)
    assert wins["parameter server"][0] == f"to {10 * 5e-6 * 25e9 / 126 / 1e3:.3g} kB"
    assert wins["double binary tree"][0] == "9.92 kB to 456 MB"
    assert wins["ring"][0] == f"from {5e-6 * 25e9 * 64 * 57 / 1e6:.3g} MB"
    never = ("binary tree", "hierarchical, rings", "hierarchical, trees")  # the latter two are ring and double tree
    assert [wins[name][0] for name in never] == ["-"] * 3


@pytest.mark.parametrize("link_gbytes", ["2", "25", "180"])
def test_where_each_wins_over_ranks(link_gbytes: str) -> None:
    _, wins = tables("--bytes", "1e8", "--link-gbytes", link_gbytes, "--nvlink-gbytes", "350", "--call-us", "0")
    ranges = {
        name: [list(map(int, run.split(" to "))) for run in cells[1].split(", ") if run != "-"]
        for name, cells in wins.items()
    }
    links = Link(350e9, 1e-6), Link(float(link_gbytes) * 1e9, 5e-6)
    for ranks in (2**power for power in range(1, 13)):
        machine = Machine(TARGETS["h100"], Topology(max(1, ranks // 8), min(8, ranks)), *links)
        costs = predict_algorithms(1e8, machine)
        (winner,) = [name for name, runs in ranges.items() if any(run[0] <= ranks <= run[-1] for run in runs)]
        assert costs[winner].seconds == min(cost.seconds for cost in costs.values())


LINES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=6)


@given(lines=LINES, size=st.floats(0, 100))
def test_crossovers_name_the_least_of_all_lines(lines: list[tuple[int, int]], size: float) -> None:
    named = {str(index): line for index, line in enumerate(lines)}
    found = find_crossovers(named)
    starts = [start for start, _ in found]
    assert starts[0] == 0
    assert starts == sorted(starts)
    base, slope = next(named[name] for start, name in reversed(found) if start <= size)
    assert base + slope * size == pytest.approx(min(base + slope * size for base, slope in lines))


def test_scaling_of_a_step() -> None:
    step = ["--compute-ms", "20", "--hidden-ms", "8"]
    *_, scaling = tables(*ISSUE, "--gpus-per-host", "1", "--nvlink-gbytes", "350", *PURE, *step)
    assert list(scaling) == ["1", *(str(2**power) for power in range(1, 13))]
    assert scaling["1"] == ["-", "0.000", "0.000", "100.0%", "1.0"]
    assert scaling["2"] == ["ring", "6.667", "0.000", "100.0%", "2.0"]
    # the ring: 2 * 63/64 * 1.2 / 180 = 13.125 ms, of which 5.125 are exposed
    assert scaling["64"] == ["ring", "13.125", "5.125", "79.6%", "50.9"]
    hidden = tables(*ISSUE, *PURE, "--compute-ms", "20", "--hidden-ms", "20")[-1]
    assert {cells[3] for cells in hidden.values()} == {"100.0%"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bytes", "0"], "bytes=0.0: must be from 1 to 1e+15"),
        (["--bytes", "-5"], "bytes=-5.0: must be from 1"),
        (["--bytes", "nan"], "bytes=nan: must be a finite number"),
        (["--bytes", "inf"], "bytes=inf: must be a finite number"),
        (["--bytes", "1e300"], "bytes=1e+300: must be from 1"),
        (["--ranks", "0"], "ranks=0: must be from 1 to 1048576"),
        (["--ranks", "1"], "ranks=1: one rank has nothing to sum"),
        (["--ranks", "-8"], "ranks=-8: must be from 1"),
        (["--ranks", "99999999999999999999"], "ranks=99999999999999999999: must be from 1 to 1048576"),
        (["--ranks", "60"], "ranks=60 is not divisible by gpus_per_host=8; nearest valid: 56, 64"),
        (["--gpus-per-host", "0"], "gpus_per_host=0: must be from 1"),
        (["--gpus-per-host", "-1"], "gpus_per_host=-1: must be from 1"),
        (["--link-gbytes", "0"], "link_gbytes=0.0: must be from 1e-06 to 1000000"),
        (["--link-gbytes", "nan"], "link_gbytes=nan"),
        (["--link-gbytes", "1e9"], "link_gbytes=1000000000.0: must be"),
        (["--nvlink-gbytes", "-350"], "nvlink_gbytes=-350"),
        (["--efficiency", "1.5"], "efficiency=1.5: must be from 0.001 to 1"),
        (["--efficiency", "0"], "efficiency=0.0: must be"),
        (["--channels", "0"], "channels=0: must be from 1 to 1024"),
        (["--channels", "9"], "channels=9: must be from 1 to 8"),
        (["--latency-us", "-1"], "latency_us=-1.0: must be from 0"),
        (["--nvlink-latency-us", "nan"], "nvlink_latency_us=nan"),
        (["--call-us", "inf"], "call_us=inf"),
        (["--compute-ms", "0"], "compute_ms=0.0: must be from 0.001"),
        (
            ["--compute-ms", "10", "--hidden-ms", "11"],
            "hidden_ms=11.0 with compute_ms=10.0: must be at most",
        ),
        (["--hidden-ms", "1"], "hidden_ms=1.0 with compute_ms=None: must be at most compute_ms; pass --compute-ms"),
        (["--target", "v100"], "target='v100' is unknown; known: a100, h100, h200, b200"),
    ],
)
def test_mistakes_take_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


def test_what_is_no_number_is_refused() -> None:
    for arguments in (["--ranks", "many"], ["--ranks", "1.5"], ["--bites", "1"]):
        with pytest.raises(SystemExit) as stopped:
            main(["cost", *arguments])
        assert stopped.value.code == 2


@pytest.mark.parametrize("ranks", ["2", "3", "4096", "1048576"])
@pytest.mark.parametrize("size_bytes", ["1", "1e15"])
def test_the_ends_of_the_ranges(ranks: str, size_bytes: str) -> None:
    extremes = ["--bytes", size_bytes, "--ranks", ranks, "--compute-ms", "0.001"]
    for link in (["--link-gbytes", "1e-6", "--latency-us", "1e6"], ["--link-gbytes", "1e6", *PURE]):
        costs, wins, scaling = tables(*extremes, *link)
        assert (list(costs), list(wins)) == (NAMES, NAMES[:6])
        assert ranks in scaling


def test_the_command_does_not_wait_for_jax() -> None:
    code = "import sys, trjax.explain.__main__ as it; it.main(['cost']); assert 'jax' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("102 MB on each of 64 ranks, 8x8: ")


def test_the_command_prints_what_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", *ISSUE]) == 0
    assert capsys.readouterr().out == describe_costs(ISSUE) + "\n"
