"""`python -m trjax.export RUN --format FORMAT`: a trained model for other programs."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np
import tyro
from jax import export as jax_export
from safetensors.numpy import save

from trjax.commands import run_command
from trjax.files import atomic_write
from trjax.models.batchnorm import fold_batchnorm
from trjax.models.weights import import_torch, to_torch
from trjax.run.saved_model import SavedModel, Which, open_model, predict

_ENDINGS = {"safetensors": "safetensors", "torchvision": "pth", "stablehlo": "stablehlo"}


@dataclass(frozen=True)
class ExportOptions:
    """Write a run's model to a file that other programs read."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    format: Literal["safetensors", "torchvision", "stablehlo"] = "safetensors"
    """Safetensors: arrays by the names that torchvision and timm use; torchvision: the same as a PyTorch state dict
    (needs torch); stablehlo: the whole network from uint8 pixels to logits, BatchNorm folded, for `jax.export`."""
    out: str = ""
    """File to write; empty: model.<ending> in the run's folder."""
    checkpoint: Which = "best"
    """Which one of the run."""
    raw: bool = False
    """The last parameters, also where the run keeps running means."""


def export_stablehlo(model: SavedModel) -> bytes:
    """Returns the serialised network, for any number of images, on CPU and GPU, for `jax.export.deserialize`."""
    params, batch_stats = fold_batchnorm(model.params, model.batch_stats)  # here, or the network would do it every time
    model = replace(model, params=params, batch_stats=batch_stats)
    (examples,) = jax_export.symbolic_shape("examples")
    images = jax.ShapeDtypeStruct((examples, *model.spec.image_shape), np.uint8)
    network = jax.jit(lambda images: predict(model, images))
    return bytes(jax_export.export(network, platforms=("cpu", "cuda"))(images).serialize())


def export(options: ExportOptions) -> str:
    """Writes the file, whole or not at all, and returns what is in it.

    Raises:
        ValueError: there is no run, or it cannot be written in this format.
        OSError: the file cannot be written.
    """
    model = open_model(options.run, options.checkpoint, options.raw)
    if model.config.model.blur_pool and options.format == "torchvision":
        raise ValueError(
            "format=torchvision: the model has blur_pool and torchvision's has not: that would be another "
            "network with these weights; use safetensors or stablehlo"
        )
    path = Path(options.out) if options.out else options.run / f"model.{_ENDINGS[options.format]}"
    with atomic_write(path) as partial:
        if options.format == "stablehlo":
            partial.write_bytes(export_stablehlo(model))
        elif options.format == "torchvision":
            torch = import_torch("format=torchvision")
            arrays = to_torch(model.params, model.batch_stats)
            torch.save({name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, partial)
        else:
            about = {"step": str(model.step), "arch": model.config.model.arch, "preset": model.config.preset}
            partial.write_bytes(save(to_torch(model.params, model.batch_stats), about))
    means = ", running means" if model.is_mean else ""
    return f"{path}: {model.config.model.arch} at step {model.step}{means}, {path.stat().st_size:,} bytes"


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code: 0, or 2 for a mistake."""
    return run_command("python -m trjax.export", ExportOptions, export, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
