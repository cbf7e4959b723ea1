import pytest

from trjax.explain import main

pytestmark = pytest.mark.fast


def test_plan_of_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "imagenet-resnet50"]) == 0
    out = capsys.readouterr().out
    assert "25,557,032 parameters, 102,440,624 bytes in 2 AllReduces a step" in out
    (row,) = [line.split() for line in out.splitlines() if " stem/layer/conv/kernel " in line]
    # behind the biases and scales of 53 normalisations (26,560 channels) and 2,049,000 of the classifier
    assert row[:5] == ["first", "G_FIRST_CONV", "stem/layer/conv/kernel", "7x7x3x64", "OHWI"]
    assert row[5:] == [str(4 * (2 * 26_560 + 2_049_000)), str(4 * 9_408)]
    assert len([line for line in out.splitlines() if line.startswith(("deep ", "first "))]) == 53 + 215 + 2


def test_physical_order_is_the_platforms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--platform", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "HWIO" in out
    assert "OHWI" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["plan", "--preset", "x"], "preset='x' is unknown"), (["plna"], "unknown command 'plna'"), ([], "")],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "python -m trjax.explain COMMAND --help" in capsys.readouterr().out
