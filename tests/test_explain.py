import json
from pathlib import Path

import pytest
from jax.experimental import topologies

from trjax.config.presets import preset_config
from trjax.explain import step
from trjax.explain.__main__ import main
from trjax.run.fit import fit

STEP = ["step", "--preset", "cifar10-resnet20", "--model.arch", "resnet8", "--topology", "1x2"]


@pytest.mark.fast
def test_plan_of_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "imagenet-resnet50"]) == 0
    out = capsys.readouterr().out
    assert "25,557,032 parameters, 102,440,628 bytes in 2 groups" in out
    (row,) = [line.split() for line in out.splitlines() if " stem/layer/conv/kernel " in line]
    # behind the biases and scales of 53 normalisations (26,560 channels) and 2,049,000 of the classifier
    assert row[:5] == ["first", "G_FIRST_CONV", "stem/layer/conv/kernel", "7x7x3x64", "OHWI"]
    assert row[5:] == [str(4 * (2 * 26_560 + 2_049_000)), str(4 * 9_408)]
    assert len([line for line in out.splitlines() if line.startswith(("deep ", "first "))]) == 53 + 215 + 2


@pytest.mark.fast
def test_physical_order_is_the_platforms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--platform", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "HWIO" in out
    assert "OHWI" not in out
    assert "two_group: 0.00 ms exposed as planned" in out  # one device


@pytest.mark.fast
def test_slow_link_takes_more_groups_and_says_what_they_save(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["--topology", "64x1", "--link-gbytes", "12.5", "--global-batch", "16384", "--reducer", "auto"]
    assert main(["plan", "--preset", "imagenet-resnet50", *slow]) == 0
    out = capsys.readouterr().out
    assert "in 4 groups" in out
    (two,) = [line for line in out.splitlines() if line.startswith("two_group:")]
    (auto,) = [line for line in out.splitlines() if line.startswith("auto:")]
    assert float(two.split()[1]) > 10
    assert float(auto.split()[1]) < 0.1
    assert auto.endswith("launched after stage4_block3, stage3_block1, stage1_block1, stem  (this run)")


def test_step_of_a_target_that_is_not_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = ["--hlo", "step.txt", "--json", "step.json", "--figure", "step.png"]
    assert main([*STEP, *files, "--strict"]) == 0
    out = capsys.readouterr().out
    assert "cifar10-resnet20, two_group, bn=local, global batch 128, 1x2 h100" in out
    assert "NOT OK" not in out
    assert out.count("\nok ") == 8
    assert "compiled without the device" in out
    assert Path("step.txt").read_text().startswith("HloModule jit_update, is_scheduled=true")
    assert Path("step.png").stat().st_size > 10_000
    table = json.loads(Path("step.json").read_text())
    assert [row["group"] for row in table["collectives"]] == ["deep", "first"]
    keys = {"group", "bytes", "dtype", "blocking", "comm_ms", "exposed_ms", "overlapped_with"}
    assert all(keys <= row.keys() for row in table["collectives"])
    keys = {"all_reduces", "blocking", "comm_ms", "exposed_ms", "exposed_bound_ms", "compute_ms", "step_ms"}
    keys |= {"images_per_second", "hbm_bytes", "temp_bytes", "kernels", "gradient_transposes"}
    assert keys | {"gather_copy_bytes", "contiguous"} <= table["summary"].keys()
    assert table["summary"]["all_reduces"] == 2
    assert all(verdict["ok"] for verdict in table["verdicts"])


def test_step_of_the_devices_here_blocks_and_strict_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    attached = ["step", "--attached", "--devices", "0-1", "--platform", "cpu"]
    assert main([*attached, "--strict"]) == 1
    out = capsys.readouterr().out
    assert "NOT OK  blocking groups: deep, first" in out
    assert "NOT OK  groups exposed" in out
    assert "NOT OK  copies to gather gradients" in out  # the CPU copies into a buffer and out of it
    assert "compiled without the device" not in out


@pytest.mark.fast
def test_the_step_is_the_one_that_train_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop(*_: object, **__: object) -> None:
        raise ValueError("the one factory was called")

    monkeypatch.setattr("trjax.step.program.make_train_step", stop)
    with pytest.raises(ValueError, match="the one factory"):
        step.main(STEP[1:])
    with pytest.raises(ValueError, match="the one factory"):
        fit(preset_config("digits"))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage"),
        (["plna"], "unknown command 'plna'"),
        (["plan", "--preset", "x"], "preset='x' is unknown"),
        (["plan", "--target", "v100"], "target='v100' is unknown; known: a100, h100, h200, b200"),
        (["step", "--topology", "8"], "topology='8': write HOSTSxGPUS"),
        (["step", "--topology", "1x7"], "global_batch=96 is not divisible by world_size=7; nearest valid: 91, 98"),
        (["step", "--link-gbytes", "-1"], "link_gbytes=-1.0"),
        (["step", "--attached", "--devices", "0-8"], "index 8 is out of range"),
        (["step", "--figure", "nowhere/step.png"], "nowhere/step.png: its folder does not exist"),
        (["step", "--figure", "step.docx"], "step.docx"),
        (["step", "--json", "."], ".: cannot be written"),
        (["step", "--attached", "--target", "h100"], "leave out --target and --topology"),
        (["step", "--topology", "3000x3000"], "9,000,000 GPUs are more than 16,384"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err + captured.out


@pytest.mark.fast
def test_without_the_plugin_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(**_: object) -> None:
        raise RuntimeError("Unknown backend cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    assert main(STEP) == 2
    assert "python3 -m pip install 'jax[cuda12]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["step", "--preset", "imagenet-resnet50", "--topology", "1x1", "--global-batch", "4096"]
    assert main(arguments) == 2
    assert "global_batch=4096 does not fit" in capsys.readouterr().err


@pytest.mark.fast
def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "python -m trjax.explain COMMAND --help" in capsys.readouterr().out
