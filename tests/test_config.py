import math
import tomllib
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from helpers import attempt, parse_config
from hypothesis import given
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from trjax.config.presets import PRESETS
from trjax.config.run import Config, DataConfig, ModelConfig, OptimConfig
from trjax.config.toml import config_from_table, config_to_toml, read_table
from trjax.run.workdir import options_that_may_change

pytestmark = pytest.mark.fast

LINE = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]))
"""What a path or a name may be."""


def parse(*arguments: str) -> Config:
    return parse_config(arguments)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip_through_toml(name: str) -> None:
    config = PRESETS[name].config
    assert config.preset == name
    assert config_from_table(tomllib.loads(config_to_toml(config)), Config(), "x") == config


@given(
    st.builds(
        Config,
        devices=LINE,
        global_batch=st.integers(1, 10**9),
        seed=st.integers(0, 2**32 - 1),
        epochs=st.integers(1000, 2000),
        workdir=LINE,
        optim=st.builds(
            OptimConfig,
            learning_rate=st.floats(1e-30, 1e30),
            warmup_epochs=st.floats(0, 1000),
            decay=st.sampled_from(["l2", "decoupled"]),
            weight_decay=st.floats(0, 1),
        ),
        model=st.builds(ModelConfig, width=st.integers(0, 999)),
    )
)
def test_any_config_round_trips_through_toml(config: Config) -> None:
    assert config_from_table(tomllib.loads(config_to_toml(config)), Config(), "x") == config


def test_later_ones_win(tmp_path: Path) -> None:
    Path("mine.toml").write_text(
        'preset = "cifar10-resnet20"\nepochs = 7\n[optim]\nmilestones = [3, 5.5]\nlearning_rate = 1\n'
    )
    config = parse("--config", "mine.toml", "--epochs", "9", "--data.root", "here", "--optim.nesterov")
    assert config.optim == replace(
        PRESETS["cifar10-resnet20"].config.optim, milestones=(3.0, 5.5), learning_rate=1.0, nesterov=True
    )
    assert (config.epochs, config.global_batch, config.data.root) == (9, 128, "here")
    assert parse("--config=mine.toml", "--preset=cifar10-resnet56", "--global_batch", "64").model.arch == "resnet56"


def test_resumed_run_starts_from_its_own_file() -> None:
    Path("run").mkdir()
    Path("run/config.toml").write_text(config_to_toml(PRESETS["cifar10-resnet18"].config))
    assert parse("--workdir", "run", "--epochs", "3") == replace(
        PRESETS["cifar10-resnet18"].config, workdir="run", epochs=3
    )
    assert parse("--workdir", "run", "--preset", "digits").model.arch == "resnet8"
    assert parse("--workdir", "new").preset == "digits"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", r"mine.toml: epoch: unknown option$"),
        ("[data]\nfolder = 'x'", r"mine.toml: data.folder: unknown option"),
        ("epochs = '3'", r"mine.toml: epochs='3': must be a valid integer$"),
        ("epochs = true", r"epochs=True: must be a valid integer"),
        ("epochs = 2.5", r"epochs=2.5: must be a valid integer"),
        ("data = 3", r"data=3: must be an object"),
        ("bn = 'none'", r"bn='none': must be 'local', 'sync' or 'rank0'$"),
        ("epochs = 0", r"epochs=0: must be positive"),
        ("[optim]\nmomentum = 0", r"optim.nesterov=True with optim.momentum=0.0: .*; pass --optim.no-nesterov"),
        (
            "epochs = 0\n[optim]\nmomentum = 1\nmilestones = [-1]",
            r"toml: epochs=0: must be positive; optim.milestones=-1: must not be negative; "
            r"optim.momentum=1: must be in \[0, 1\)$",
        ),
        ("preset = 'nothing'", r"preset='nothing' is unknown; known: digits, "),
        ("preset = 3", r"preset='3' is unknown"),
        ("epochs = ", r"cannot read the configuration mine.toml"),
        ("seed = 1\nseed = 2", r"cannot read the configuration mine.toml"),
        ("epochs = 1979-05-27", r"epochs: must be a valid integer"),
        ("workdir = 1979-05-27", r"workdir: must be a valid string"),
        ("#" * 2**14 + "\n", r"mine.toml: it is larger than 16,384 bytes"),
    ],
)
def test_bad_file_names_the_option(text: str, message: str) -> None:
    Path("mine.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        parse("--config", "mine.toml")


def test_missing_file() -> None:
    with pytest.raises(ValueError, match="cannot read the configuration gone.toml"):
        parse("--config", "gone.toml")
    Path("binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cannot read the configuration binary.toml"):
        read_table("binary.toml")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Config(global_batch=0), "global_batch=0: must be positive"),
        (lambda: Config(seed=-1), "seed=-1: must be from 0 to 4294967295"),
        (lambda: Config(log_every=0), "^log_every=0: must be positive$"),
        (lambda: Config(epochs=2, optim=OptimConfig(warmup_epochs=3)), "warm-up must end within the run"),
        (lambda: OptimConfig(learning_rate=0), "learning_rate=0"),
        (lambda: OptimConfig(learning_rate=float("nan")), "learning_rate=nan"),
        (lambda: OptimConfig(schedule="step"), "milestones belong to schedule=step, which needs them"),
        (lambda: OptimConfig(milestones=(1.0,)), "milestones belong to schedule=step"),
        (lambda: OptimConfig(schedule="step", milestones=(2.0, 1.0)), "must increase"),
        (lambda: OptimConfig(momentum=1.0), r"^optim.momentum=1.0: must be in \[0, 1\)$"),
        (lambda: OptimConfig(weight_decay=-1.0), "optim.weight_decay=-1.0"),
        (lambda: DataConfig(image_shape=(8, 8, 1)), "data.source=digits with data.image_shape"),
        (lambda: DataConfig(num_classes=3), "only data.source=synthetic takes all three; leave them out"),
        (lambda: DataConfig(source="synthetic", image_shape=(8, 8)), "height, width, channels"),
        (lambda: DataConfig(source="synthetic", image_shape=(8, 0, 1)), "all positive"),
        (lambda: DataConfig(source="synthetic", image_shape=(2**11, 2**10, 2**10)), r"less than 2\^31 bytes in all"),
        (lambda: DataConfig(crop_padding=-1), "data.crop_padding=-1"),
        (lambda: DataConfig(source="synthetic", num_classes=-2), "data.num_classes=-2"),
        (lambda: OptimConfig(learning_rate=float("inf")), "learning_rate=inf"),
        (lambda: OptimConfig(step_factor=-3.0), r"optim.step_factor=-3.0: must be in \(0, 1\)$"),
        (lambda: Config(epochs=20, optim=OptimConfig(schedule="step", milestones=(82.0,))), "pass --optim.milestones"),
        (lambda: ModelConfig(width=-1), "model.width=-1"),
        (lambda: Config(accumulate=0), "accumulate=0: must be positive"),
        (lambda: Config(bucket_mb=-1.0), "bucket_mb=-1.0: must not be negative"),
        (
            lambda: Config(epochs=3, data=DataConfig(sizes=(4,), size_epochs=(3,))),
            r"data.size_epochs=\(3,\) with epochs=3",
        ),
        (lambda: Config(profile_steps="9:8"), "profile_steps=9:8: must be the first and the last"),
        (lambda: Config(epochs=2**31), "epochs=2147483648: must be at most 2147483647, the largest int32"),
        (lambda: OptimConfig(weight_decay=1e300), r"optim.weight_decay=1e\+300: must be at most 3.4e\+38"),
        (lambda: DataConfig(least_area=0.0), r"data.least_area=0.0: must be in \(0, 1\]$"),
        (lambda: DataConfig(sizes=(4, 0), size_epochs=(1, 2)), "^data.sizes=0: must be from 1 to 4096$"),
        (lambda: DataConfig(sizes=(4,)), r"^data.sizes=\(4,\) with data.size_epochs=\(\): each size needs the epoch"),
        (lambda: DataConfig(mixup=1e-4), "data.mixup=0.0001: must be from 0.001 to 1000, or 0 to disable it"),
        (lambda: ModelConfig(dropout=0.99), r"model.dropout=0.99: must be in \[0, 0.99\)$"),
        (lambda: Config(bn="none"), "bn='none': must be 'local', 'sync' or 'rank0'"),  # type: ignore[arg-type]
        (lambda: Config(keep=0, hosts=-1), "^hosts=-1: must not be negative; keep=0: must be positive$"),
        (lambda: Config(overfit_batches=-1), "overfit_batches=-1: must not be negative"),
        (lambda: Config(hosts=-1), "hosts=-1: must not be negative"),
        (lambda: Config(nccl=("ALGO=Ring",)), "nccl='ALGO=Ring': write NCCL_NAME=VALUE"),
        (lambda: OptimConfig(clip_norm=-1.0), "optim.clip_norm=-1.0"),
        (lambda: OptimConfig(beta2=1.0), r"optim.beta2=1.0: must be in \(0, 1\)$"),
        (lambda: OptimConfig(trust=0.0), "optim.trust=0.0"),
        (lambda: OptimConfig(beta2=1 - 1e-9), "optim.beta2=0.999999999: must be below 1, also when rounded to float32"),
        (
            lambda: OptimConfig(momentum=1 - 1e-9),
            "optim.momentum=0.999999999: must be below 1, also when rounded to float32",
        ),
        (
            lambda: OptimConfig(clip_norm=1e-40),
            r"optim.clip_norm=1e-40: must be from 1e-30 to 1e\+30, or 0 to disable clipping",
        ),
        (lambda: OptimConfig(learning_rate=1e-40), "optim.learning_rate=1e-40"),
        (lambda: OptimConfig(schedule="step", milestones=(1.0, float("nan"))), "optim.milestones=nan"),
        (lambda: Config(optim=OptimConfig(learning_rate=1e30, scale_from_batch=1)), "optim.scale_from_batch=1: the sc"),
        (
            lambda: ModelConfig(width=2**16 + 1),
            "model.width=65537: must be from 1 to 65536, or 0 for the paper's width",
        ),
        (lambda: Config(watchdog_seconds=1e10), "watchdog_seconds=10000000000.0: must be from 0 to 1000000000"),
        (
            lambda: Config(link_gbytes=1e-9),
            "link_gbytes=1e-09: must be from 1e-06 to 1000000, or 0 to use the data sheet",
        ),
        (lambda: Config(nccl=("NCCL_=x",)), "nccl='NCCL_=x': write"),
        (lambda: Config(workdir="two\nlines"), r"workdir='two\\nlines': must be one line of text"),
        (lambda: Config(freeze=("stem/*", "\ud800")), r"freeze='\\ud800': must be one line of text"),
    ],
)
def test_impossible_values(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


SECTIONS = (Config, DataConfig, ModelConfig, OptimConfig)


def declared_ranges(options: Any) -> Iterator[tuple[str, bool, dict[str, float]]]:
    """Yields each option with a range: its name, whether its items have the range, and the bounds."""
    for field in fields(options):
        info = FieldInfo.from_annotation(field.type)  # type: ignore[arg-type]
        is_tuple = get_origin(info.annotation) is tuple
        items = FieldInfo.from_annotation(get_args(info.annotation)[0]) if is_tuple else info
        bounds = {
            name: getattr(item, name)
            for item in items.metadata
            for name in ("gt", "ge", "lt", "le")
            if hasattr(item, name)
        }
        if bounds:
            yield field.name, is_tuple, bounds


def neighbour(bound: float, toward: float) -> float:
    """Returns the next number after a bound, of the same type."""
    return bound + int(math.copysign(1, toward)) if isinstance(bound, int) else math.nextafter(bound, toward)


RANGES = [(options, *found) for options in SECTIONS for found in declared_ranges(options)]


@pytest.mark.parametrize(
    ("options", "name", "is_tuple", "bounds"), RANGES, ids=[f"{item[0].__name__}.{item[1]}" for item in RANGES]
)
def test_declared_bounds_hold(options: Any, name: str, is_tuple: bool, bounds: dict[str, float]) -> None:
    def problem(value: float) -> str:
        """Returns the message about the value alone; "" if there is none, or another option is named too."""
        _, error = attempt(lambda: options(**{name: (value,) if is_tuple else value}))
        return error if f"{name}={value!r}: must " in error else ""

    assert bounds.keys() & {"gt", "ge"}
    assert bounds.keys() & {"lt", "le"} or set(bounds.values()) == {0}  # the messages know no other range
    for kind, bound in bounds.items():
        outside = -math.inf if kind in ("gt", "ge") else math.inf
        refused, accepted = (neighbour(bound, outside), bound) if kind in ("ge", "le") else (bound, None)
        assert problem(refused), refused
        if accepted is not None:
            assert not problem(accepted), accepted
        if kind == "gt" and isinstance(bound, int) and isinstance(getattr(options(), name), int):
            assert not problem(bound + 1)


def test_every_number_has_a_range() -> None:
    ranged = {(options, name) for options, name, *_ in RANGES}
    others = [
        f"{options.section}{field.name}"
        for options in SECTIONS
        for field in fields(options)
        if type(getattr(options(), field.name)) in (int, float) and (options, field.name) not in ranged
    ]
    assert sorted(others) == ["data.cutmix", "data.mixup", "link_gbytes", "model.width", "optim.clip_norm"]


@pytest.mark.parametrize(
    ("options", "name", "low", "high"),
    [
        (Config, "link_gbytes", 1e-6, 1e6),
        (DataConfig, "mixup", 1e-3, 1e3),
        (DataConfig, "cutmix", 1e-3, 1e3),
        (ModelConfig, "width", 1, 2**16),
        (OptimConfig, "clip_norm", 1e-30, 1e30),
    ],
)
def test_zero_or_a_range(options: Any, name: str, low: float, high: float) -> None:
    for value in (0, low, high):
        assert getattr(options(**{name: value}), name) == value
    for value in (-low, neighbour(high, math.inf), *([low / 2] if isinstance(low, float) else [])):
        with pytest.raises(ValueError, match=rf"{name}=.*: must be from .* to .*, or 0 "):
            options(**{name: value})


def test_what_a_resumed_run_may_change() -> None:
    assert sorted(options_that_may_change()) == [
        "bucket_mb",
        "data.on_error",
        "data.root",
        "data.workers",
        "deterministic",
        "devices",
        "epochs",
        "hosts",
        "init_from",
        "keep",
        "keep_compiled",
        "link_gbytes",
        "log_every",
        "max_bad_steps",
        "nccl",
        "platform",
        "preset",
        "profile_steps",
        "reducer",
        "remat",
        "save_every",
        "steps_per_dispatch",
        "tensorboard",
        "watchdog_seconds",
        "workdir",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epoch", "3"], "--epochs"),
        (["--epochs", "x"], "--epochs"),
        (["--bn", "none"], "--bn"),
        (["--data.sauce", "x"], "--data.sauce"),
        (["--global-batch"], "--global-batch"),
    ],
)
def test_bad_option_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(*arguments)
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.out + captured.err


def test_help_lists_presets_with_what_to_expect(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse("--help")
    assert exit_info.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for name, preset in PRESETS.items():
        assert f"{name}: {preset.expected}" in out
        assert name == "digits" or "not run here" in preset.expected
    for option in ("--config", "--devices", "--platform", "--global-batch", "--epochs", "--seed", "--bn", "--precision",
                   "--workdir", "--data.root"):  # fmt: skip
        assert option in out
