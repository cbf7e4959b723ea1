"""Whatever comes in as a file or an option: a configuration that can be, or an error of one line that names it."""

import contextlib
import io
import math
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from helpers import attempt, parse_config
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trjax.config.presets import PRESETS
from trjax.config.run import Config
from trjax.config.toml import config_from_table, config_to_toml, read_table
from trjax.run.workdir import flat_options

pytestmark = pytest.mark.fast

OPTIONS = list(flat_options(asdict(Config())))
VALUES = st.recursive(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"])),  # TOML cannot have them
        st.integers(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.booleans(),
        st.datetimes(),
        st.sampled_from(["cpu", "sync", "synthetic", "step", "NCCL_ALGO=Ring", 0, 1, 2**31, math.nan, math.inf]),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc_\n"), inner, max_size=2),
    max_leaves=4,
)


def nested(option: str, value: Any) -> dict[str, Any]:
    outer, _, inner = option.rpartition(".")
    return {outer: {inner: value}} if outer else {option: value}


def require_usable(config: Config) -> None:
    """What was accepted is written and read back as it is, and holds nothing that a device cannot."""
    assert config_from_table(tomllib.loads(config_to_toml(config)), Config(), "x") == config
    for value in flat_options(asdict(config)).values():
        for item in value if isinstance(value, tuple) else [value]:
            assert not isinstance(item, float) or abs(item) < 2.0**128
            assert not isinstance(item, int) or abs(item) <= 2**32
            assert not isinstance(item, str) or "\0" not in item


@given(st.sampled_from(OPTIONS), VALUES)
@example("optim.weight_decay", math.inf)
@example("workdir", "\0")
@example("workdir", tomllib.loads("day = 1979-05-27")["day"])
@example("epochs", 2**31)
@example("data.image_shape", [2**11, 2**10, 2**10])
def test_any_value_of_any_option_is_taken_or_named(option: str, value: Any) -> None:
    config, problem = attempt(lambda: config_from_table(nested(option, value), Config(), "mine.toml"))
    if config is None:
        assert problem.startswith("mine.toml: ")
        assert option.rpartition(".")[2] in problem
    else:
        require_usable(config)


def mend(text: str, start: int, length: int, what: str) -> str:
    return text[:start] + what + text[start + length :]


@given(
    st.one_of(
        st.binary(max_size=60),
        st.text(max_size=60).map(lambda text: text.encode(errors="surrogatepass")),
        st.builds(
            mend,
            st.sampled_from([config_to_toml(preset.config) for preset in PRESETS.values()]),
            st.integers(0, 1100),
            st.integers(0, 40),
            st.sampled_from(["", "\n", "'", "[", "]", "= 3\n", "\ufeff", "\0", "[data]\n", "epochs = 5\n", "1e999"]),
        ).map(str.encode),
    )
)
@example(b"a = " + b"[" * 5000)
@example(b"a." * 8000 + b"a = 1")
@example(b"epochs = 1" + b"0" * 5000)
@example(b"epochs = 0x1" + b"0" * 5000)
@example(b"# " * 10000)
@example(b"epochs = 3\nepochs = 3\n")
@example(b'"two\\nlines" = 3')
def test_any_file_is_a_configuration_or_named(content: bytes) -> None:
    Path("mine.toml").write_bytes(content)
    config, problem = attempt(lambda: config_from_table(read_table("mine.toml"), Config(), "mine.toml"))
    if config is None:
        assert "mine.toml: " in problem
    else:
        require_usable(config)


@settings(max_examples=15)  # a tenth of a second each
@given(
    st.sampled_from([option for option in OPTIONS if not isinstance(flat_options(asdict(Config()))[option], bool)]),
    st.text() | st.integers().map(str) | st.floats().map(str),
)
@example("epochs", str(2**63))
@example("optim.milestones", "nan")
@example("bucket_mb", "-inf")
@example("workdir", "a" * 5000)
@example("config", "")
@example("preset", "")
@example("freeze", "\udcff")
@example("profile_steps", "\U00018d09")
def test_any_word_for_any_option_is_taken_or_named(option: str, word: str) -> None:
    said = io.StringIO()
    code: object = 2
    config, problem = None, ""
    try:
        with contextlib.redirect_stderr(said):
            config, problem = attempt(lambda: parse_config([f"--{option.replace('_', '-')}={word}"]))
    except SystemExit as end:
        code = end.code
    if config is None:
        assert code == 2
        assert option in (problem or said.getvalue().replace("-", "_"))
    else:
        require_usable(config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", r"^cannot read the configuration \.: Is a directory$"),
        ("/dev/zero", r"^cannot read the configuration /dev/zero: it is larger than 16,384 bytes$"),
        ("a" * 300, r"^cannot read the configuration a{100}\.\.\.: File name too long$"),
        ("two\nlines", r"^cannot read the configuration two\\nlines: No such file or directory$"),
        ("", r"^config='': names no file; leave --config out to start from a preset$"),
    ],
)
def test_no_file_of_a_configuration(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(["--config", name])


def test_options_come_after_a_file_that_is_possible_by_itself() -> None:
    Path("mine.toml").write_text("epochs = 1\n")
    with pytest.raises(ValueError, match=r"pass --optim.warmup-epochs \(in the file itself"):
        parse_config(["--config", "mine.toml", "--optim.warmup-epochs", "0"])
