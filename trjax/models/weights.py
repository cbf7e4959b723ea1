"""Weights under the names and in the layouts that torchvision and timm give them, and back.

Kernels are OIHW there and HWIO here, the classifier is transposed, and blocks of a stage are counted from 0.
"""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from trjax.trees import name_leaves, restore_leaves

_LEAVES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "running_mean": "running_mean",
    "running_var": "running_var",
}


def torch_name(name: str) -> str:
    """Returns what torchvision calls a leaf of a ResNet's parameters or statistics.

    >>> torch_name("stage2_block1/shortcut/norm/running_var"), torch_name("stem/layer/conv/kernel")
    ('layer2.0.downsample.1.running_var', 'conv1.weight')

    Raises:
        ValueError: it is of no ResNet of trjax's.
    """
    *path, leaf = name.split("/")
    block = re.fullmatch(r"stage(\d+)_block(\d+)", path[0])
    if leaf not in _LEAVES:
        raise ValueError(f"{name} has no counterpart in torchvision's ResNets")
    if path == ["head", "fc"]:
        return f"fc.{_LEAVES[leaf]}"
    if path[:2] == ["stem", "layer"]:
        return f"{'conv1' if path[2] == 'conv' else 'bn1'}.{_LEAVES[leaf]}"
    if block is None or len(path) != 3:
        raise ValueError(f"{name} has no counterpart in torchvision's ResNets")
    layer = re.fullmatch(r"layer(\d+)", path[1])
    if layer is None:
        part = f"downsample.{0 if path[2] == 'conv' else 1}"
    else:
        part = f"{'conv' if path[2] == 'conv' else 'bn'}{layer.group(1)}"
    return f"layer{block.group(1)}.{int(block.group(2)) - 1}.{part}.{_LEAVES[leaf]}"


def to_torch(params: Any, batch_stats: Any) -> dict[str, np.ndarray]:
    """Returns the arrays of a ResNet by torchvision's names, in torchvision's layouts.

    Raises:
        ValueError: it is no ResNet of trjax's.
    """
    leaves = name_leaves(params) | name_leaves(batch_stats)
    arrays: dict[str, np.ndarray] = {}
    for name, leaf in leaves.items():
        array = np.asarray(leaf, np.float32)
        if name.endswith("/kernel"):
            array = array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T
        arrays[torch_name(name)] = np.ascontiguousarray(array)
    return arrays


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays in a file, by name, as float32; nothing in it is executed.

    Args:
        path: .safetensors, or a state dict that PyTorch has saved.

    Raises:
        ValueError: it cannot be read; says why.
    """
    try:
        if path.suffix == ".safetensors":
            arrays = load_file(path)
        elif path.suffix in (".pth", ".pt"):
            arrays = _load_torch(path)
        else:
            raise ValueError("its name must end in .safetensors, .pth or .pt")
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"init_from={path}: {error}") from error
    return {name: np.asarray(array, np.float32) for name, array in arrays.items()}


def import_torch(what: str) -> Any:
    """Returns PyTorch, which `what` needs and nothing else does.

    Raises:
        ValueError: it is not there.
    """
    try:
        import torch
    except ImportError as error:
        raise ValueError(f"{what} needs PyTorch: python3 -m pip install torch") from error
    return torch


def _load_torch(path: Path) -> dict[str, np.ndarray]:
    torch = import_torch("reading it")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"it is no state dict of tensors ({str(error).splitlines()[0]})") from error
    if not isinstance(saved, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in saved.values()):
        raise ValueError("it is no state dict of tensors")
    return {name: tensor.float().numpy() for name, tensor in saved.items()}


def from_torch(arrays: Mapping[str, np.ndarray], params: Any, batch_stats: Any) -> tuple[Any, Any, tuple[str, ...]]:
    """Returns parameters and statistics with the values of a file; the classifier stays if it is of another size.

    Args:
        arrays: by torchvision's names, in its layouts.
        params: initial ones, `{segment: tree}`, or their shapes if nothing of them is to stay.
        batch_stats: likewise.

    Returns:
        Both trees, and the names of what stayed.

    Raises:
        ValueError: they are of another model; lists what differs.
    """
    found: dict[str, Any] = {}
    stayed, differing = [], []
    ours = name_leaves(params) | name_leaves(batch_stats)
    theirs = {name for name in arrays if not name.endswith("num_batches_tracked")}
    for name, leaf in ours.items():
        there = torch_name(name)
        theirs.discard(there)
        array = arrays.get(there)
        if array is not None and name.endswith("/kernel"):
            array = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
        if array is not None and array.shape == leaf.shape:
            found[name] = np.ascontiguousarray(array, np.float32)
        elif name.startswith("head/"):
            stayed.append(name)
            found[name] = leaf
        else:
            shape = "missing" if array is None else f"{list(array.shape)} there"
            differing.append(f"{there} ({name}) is {shape} and {list(leaf.shape)} here")
    differing += [f"{name} is not of this model" for name in sorted(theirs)]
    if differing:
        more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise ValueError(f"it is of another model: {'; '.join(differing[:5])}{more}")
    return restore_leaves(found, params), restore_leaves(found, batch_stats), tuple(stayed)
