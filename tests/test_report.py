"""The page about runs: what it says, and that a browser shows it whole."""

import csv
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers import tiny_config

from trjax import report
from trjax.config.run import OptimConfig
from trjax.config.toml import config_to_toml


def write_run(folder: str, rate: float, steps: int = 4) -> None:
    Path(folder).mkdir()
    config = tiny_config(optim=OptimConfig(learning_rate=rate), devices="0-7")
    Path(folder, "config.toml").write_text(config_to_toml(config))
    lines = []
    for step in range(1, steps + 1):
        line = {"epoch": step, "step": 5 * step, "top5": 0.9, "examples": 100, "skipped": int(step == 2)}
        line |= {"learning_rate": rate, "images_per_second": 100.0 * step, "seconds": float(step)}
        lines.append({"split": "train", "loss": 2.0 / step, "top1": 0.1 * step, **line})
        lines.append(
            {"split": "test", "loss": None if step == 1 else 2.1 / step, "top1": 0.2 if step == 3 else 0.1, **line}
        )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    Path(folder, "metrics.jsonl").write_text(text + "no record\n")


def test_the_page_says_what_runs_came_to_and_how_they_differ(capsys: pytest.CaptureFixture[str]) -> None:
    write_run("one", 0.05)
    write_run("<two>", 0.1, 3)
    assert report.main(["one", "<two>", "--target", "", "--out", "page.html", "--csv", "all.csv"]) == 0
    assert capsys.readouterr().out == "page.html\n"
    page = Path("page.html").read_text()
    for text in ("20.00% at 15", "10.00%", "0.5000", "&lt;two&gt;", "optim.learning_rate", "0.05", "top-1 (%)"):
        assert text in page
    assert "<two>" not in page
    assert "global_batch" not in page  # the same in both
    assert not any(text in page for text in ("src=", 'href="http', "@import", "url(http"))  # all of it is in it
    ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    with Path("all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["split"]) for row in rows[:2]] == [("one", "train"), ("one", "test")]
    assert len(rows) == 2 * (4 + 3)


def test_the_page_of_one_run_shows_what_its_step_compiles_to() -> None:
    write_run("run", 0.05)
    assert report.main(["run"]) == 0
    page = Path("run/report.html").read_text()
    assert "What differs" not in page
    for text in ("for 1x8 h100", "2 collectives", "exposed", "predicted time from the start of the step"):
        assert text in page
    assert page.count("<svg") == 2


def test_a_step_that_cannot_be_compiled_is_told_on_the_page() -> None:
    write_run("run", 0.05)
    path = Path("run/config.toml")
    path.write_text(config_to_toml(replace(tiny_config(), global_batch=25)))
    assert report.main(["run"]) == 0
    assert "global_batch=25 is not divisible by world_size=8" in Path("run/report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere holds no run"),
        (["empty"], "empty has no records yet"),
        (["run", "--out", "no/page.html"], "no/page.html: its folder does not exist"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_run("run", 0.05)
    shutil.copytree("run", "empty")
    Path("empty/metrics.jsonl").unlink()
    assert report.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser here")
def test_a_browser_shows_the_page() -> None:
    write_run("one", 0.05)
    write_run("two", 0.1, 3)
    assert report.main(["one", "two", "--target", "", "--out", "page.html"]) == 0
    options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-sync --disable-background-networking"
    options += " --disable-component-update --window-size=1200,1600 --screenshot=page.png --virtual-time-budget=3000"
    command = ["chromium", *options.split(), f"--user-data-dir={Path('profile').resolve()}"]
    subprocess.run([*command, Path("page.html").resolve().as_uri()], check=True, capture_output=True, timeout=120)
    assert Path("page.png").stat().st_size > 30_000
