"""Weights and whole networks for other programs, and back."""

import pickle
import re
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DATA, spread, tiny_config
from jax import export as jax_export
from PIL import Image
from safetensors.numpy import load_file, save_file

from trjax import export, predict
from trjax.config.run import ModelConfig
from trjax.data.augment import normalise
from trjax.data.sources import load
from trjax.models.chain import evaluate_chain, init_chain
from trjax.models.resnet import make_resnet
from trjax.models.weights import from_torch, read_weights, to_torch, torch_name
from trjax.run.fit import fit
from trjax.run.saved_model import open_model
from trjax.train import main
from trjax.trees import name_leaves

RUN = replace(tiny_config(epochs=1), model=ModelConfig(arch="resnet8", width=4), devices="0-1", workdir="run")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert fit(replace(RUN, workdir=str(folder), optim=replace(RUN.optim, ema_decay=0.5))).finished
    return folder


def weights(arch: str, seed: int = 0, **options: Any) -> Any:
    chain = make_resnet(arch, num_classes=10, width=4, **options)
    params, batch_stats = init_chain(chain, jax.random.key(seed), (32, 32, 3))
    return chain, params, batch_stats


NAMES = {
    "stem/layer/conv/kernel": "conv1.weight",
    "stem/layer/norm/scale": "bn1.weight",
    "stage1_block1/layer1/conv/kernel": "layer1.0.conv1.weight",
    "stage3_block6/layer3/norm/running_var": "layer3.5.bn3.running_var",
    "stage2_block1/shortcut/conv/kernel": "layer2.0.downsample.0.weight",
    "stage2_block1/shortcut/norm/bias": "layer2.0.downsample.1.bias",
    "head/fc/kernel": "fc.weight",
    "head/fc/bias": "fc.bias",
}


def test_names_are_those_of_torchvision() -> None:
    assert {name: torch_name(name) for name in NAMES} == NAMES
    for arch in ("resnet18", "resnet50"):
        params, batch_stats = jax.eval_shape(lambda arch=arch: weights(arch)[1:])
        leaves = [*name_leaves(params), *name_leaves(batch_stats)]
        names = {torch_name(name) for name in leaves}
        assert len(names) == len(leaves)
        assert all(
            re.fullmatch(r"(layer\d\.\d+\.(conv\d|bn\d|downsample\.[01])|conv1|bn1|fc)\.\w+", name) for name in names
        )


@pytest.mark.parametrize("name", ["own/kernel", "stage1_block1/kernel", "stem/layer/conv/strange"])
def test_other_models_have_no_names_there(name: str) -> None:
    with pytest.raises(ValueError, match="has no counterpart in torchvision's ResNets"):
        torch_name(name)


def test_there_and_back_is_nothing() -> None:
    _, params, batch_stats = weights("resnet18")
    params, batch_stats = spread(params), spread(batch_stats, 1)
    arrays = to_torch(params, batch_stats)
    assert arrays["conv1.weight"].shape == (4, 3, 7, 7)
    assert arrays["fc.weight"].shape == (10, 32)
    _, fresh, fresh_stats = weights("resnet18", seed=1)
    back, stats, stayed = from_torch({**arrays, "bn1.num_batches_tracked": np.zeros(())}, fresh, fresh_stats)
    assert stayed == ()
    jax.tree.map(np.testing.assert_array_equal, (back, stats), (params, batch_stats))


def test_a_head_of_another_size_stays_and_anything_else_is_named() -> None:
    _, params, batch_stats = weights("resnet18")
    arrays = to_torch(params, batch_stats)
    other = {**arrays, "fc.weight": np.zeros((7, 32), np.float32), "fc.bias": np.zeros(7, np.float32)}
    _, fresh, fresh_stats = weights("resnet18", seed=1)
    back, _, stayed = from_torch(other, fresh, fresh_stats)
    assert set(stayed) == {"head/fc/kernel", "head/fc/bias"}
    np.testing.assert_array_equal(back["head"]["fc"]["kernel"], fresh["head"]["fc"]["kernel"])
    np.testing.assert_array_equal(back["stem"]["layer"]["conv"]["kernel"], params["stem"]["layer"]["conv"]["kernel"])
    fewer = {name: leaf for name, leaf in arrays.items() if name != "conv1.weight"}
    message = r"of another model: .*(extra\.weight is not of|conv1\.weight .* is missing)"
    for wrong in ({**arrays, "extra.weight": np.zeros(1)}, fewer):
        with pytest.raises(ValueError, match=message):
            from_torch(wrong, fresh, fresh_stats)


def test_pytorch_computes_the_same_logits() -> None:
    """Where torch and torchvision are there: an optional check."""
    torch, models = pytest.importorskip("torch"), pytest.importorskip("torchvision.models")
    for arch in ("resnet18", "resnet50"):
        chain = make_resnet(arch, num_classes=10)
        params, batch_stats = init_chain(chain, jax.random.key(0), (64, 64, 3))
        params, batch_stats = jax.tree.map(lambda leaf: leaf * 0.5 if leaf.ndim > 1 else leaf, params), batch_stats
        theirs = getattr(models, arch)(num_classes=10)
        arrays = {name: torch.from_numpy(array.copy()) for name, array in to_torch(params, batch_stats).items()}
        theirs.load_state_dict(arrays)  # strictly
        images = np.random.default_rng(0).normal(size=(2, 64, 64, 3)).astype(np.float32)
        with torch.no_grad():
            expected = theirs.eval()(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()
        found = evaluate_chain(chain, params, batch_stats, jnp.asarray(images))
        np.testing.assert_allclose(found, expected, atol=1e-4)
        torch.save(theirs.state_dict(), "weights.pth")
        back, stats, stayed = from_torch(read_weights(Path("weights.pth")), params, batch_stats)
        assert stayed == ()
        jax.tree.map(np.testing.assert_array_equal, (back, stats), (params, batch_stats))


def test_pytorch_reads_the_state_dict(trained: Path) -> None:
    torch = pytest.importorskip("torch")
    assert export.main([str(trained), "--format", "torchvision", "--out", "model.pth"]) == 0
    saved = torch.load("model.pth", weights_only=True)
    model = open_model(trained)
    expected = to_torch(model.params, model.batch_stats)
    assert saved.keys() == expected.keys()
    assert all(np.array_equal(saved[name].numpy(), expected[name]) for name in saved)


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is here")
def test_without_pytorch_its_formats_say_what_to_install(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main([str(trained), "--format", "torchvision"]) == 2
    assert "needs PyTorch: python3 -m pip install torch" in capsys.readouterr().err
    Path("x.pth").touch()
    with pytest.raises(ValueError, match=r"init_from=x.pth: reading it needs PyTorch"):
        read_weights(Path("x.pth"))


def test_an_export_holds_the_running_means_and_starts_another_run(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main([str(trained), "--out", "model.safetensors"]) == 0
    assert "resnet8 at step 5, running means" in capsys.readouterr().out
    model, raw = open_model(trained), open_model(trained, "last", raw=True)
    arrays = load_file("model.safetensors")
    expected = to_torch(model.params, model.batch_stats)
    assert arrays.keys() == expected.keys()
    assert all(np.array_equal(arrays[name], expected[name]) for name in arrays)
    assert np.abs(arrays["conv1.weight"] - to_torch(raw.params, raw.batch_stats)["conv1.weight"]).max() > 1e-5

    # A rate next to nothing: what it starts from is what it ends with.
    slow = replace(RUN, workdir="slow", init_from="model.safetensors", optim=replace(RUN.optim, learning_rate=1e-30))
    fit(slow)
    tuned = open_model(Path("slow"), "last")
    jax.tree.map(np.testing.assert_array_equal, tuned.params, model.params)
    fewer = replace(slow, workdir="fewer", data=replace(DATA, num_classes=7))
    fit(fewer)
    assert "has no head/fc/bias, head/fc/kernel of this size: these start from random values" in capsys.readouterr().out
    assert name_leaves(open_model(Path("fewer")).params)["head/fc/kernel"].shape == (16, 7)


def test_the_exported_network_computes_what_an_evaluation_does(trained: Path) -> None:
    assert export.main([str(trained), "--format", "stablehlo", "--out", "net"]) == 0
    network = jax_export.deserialize(bytearray(Path("net").read_bytes()))
    model = open_model(trained)
    images, _ = load(RUN.data)[1].read(np.arange(5))
    expected = evaluate_chain(
        model.program.gradients.chain, model.params, model.batch_stats, normalise(jnp.asarray(images), model.spec)
    )
    np.testing.assert_allclose(network.call(images), expected, atol=1e-5)
    np.testing.assert_allclose(network.call(images[:2]), expected[:2], atol=1e-5)
    assert set(network.platforms) == {"cpu", "cuda"}
    assert "rsqrt" not in network.mlir_module()  # BatchNorm is folded, once and for all


def test_images_are_named(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, _ = load(RUN.data)[1].read(np.arange(1))
    Image.fromarray(images[0]).resize((16, 16), Image.Resampling.NEAREST).save("big.png")
    Image.new("L", (5, 40), 100).save("tall.png")
    assert predict.main([str(trained), "big.png", "tall.png", "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["image", "big.png", "big.png", "tall.png", "tall.png"]
    assert all(re.search(r"class \d +\d+\.\d\d%$", line) for line in lines[1:])
    Image.fromarray(images[0, ..., 0].astype(np.uint16) * 257).save("deep.png")  # of 16 bits
    Image.fromarray(images[0, ..., 0]).save("grey.png")
    assert predict.main([str(trained), "deep.png", "grey.png", "--top", "1"]) == 0
    deep, grey = [line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:]]
    assert deep == grey


def test_what_torchvision_would_take_for_another_network_is_not_written(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, "blurred")
    text = Path("blurred/config.toml").read_text()
    Path("blurred/config.toml").write_text(text.replace("blur_pool = false", "blur_pool = true"))
    assert export.main(["blurred", "--format", "torchvision"]) == 2
    assert "the model has blur_pool and torchvision's has not" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (predict, ["nowhere", "a.png"], "nowhere holds no run"),
        (predict, ["RUN", "text.png"], "text.png cannot be used: it is no image"),
        (predict, ["RUN", "missing.png"], "No such file"),
        (predict, ["RUN", "text.png", "--top", "0"], "top=0, 1 images"),
        (export, ["nowhere"], "nowhere holds no run"),
        (export, ["empty"], "empty holds no checkpoint yet"),
        (export, ["RUN", "--out", "no/folder/x"], "No such file"),
    ],
)
def test_mistakes_are_one_line(
    command: Any, arguments: list[str], message: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.png").write_text("no image")
    Path("empty").mkdir()
    shutil.copy(trained / "config.toml", "empty")
    assert command.main([str(trained) if argument == "RUN" else argument for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


class _Malicious:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("owned"),))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # of PyTorch, where it is installed
def test_files_that_are_no_weights_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.safetensors").write_bytes(b"nothing")
    Path("x.pth").write_bytes(pickle.dumps(_Malicious()))
    Path("x.txt").touch()
    for name in ("x.safetensors", "x.pth", "x.txt", "missing.safetensors"):
        with pytest.raises(ValueError, match=f"init_from={name}: "):
            read_weights(Path(name))
    assert not Path("owned").exists()
    save_file({"other": np.zeros(1, np.float32)}, "y.safetensors")
    options = ["--data.source", "synthetic", "--model.width", "4", "--epochs", "1", "--optim.warmup-epochs", "0"]
    assert main([*options, "--platform", "cpu", "--devices", "0-1", "--init-from", "missing.safetensors"]) == 2
    assert not Path("runs").exists()
    capsys.readouterr()
    assert main([*options, "--platform", "cpu", "--devices", "0-1", "--init-from", "y.safetensors"]) == 2
    assert "init_from=y.safetensors: it is of another model: " in capsys.readouterr().err
