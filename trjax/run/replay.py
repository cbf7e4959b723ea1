"""A step whose gradients were not finite, repeated op by op, to find where it begins."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trjax.config.run import Config
from trjax.data.batches import Batch, Inputs, read_batch
from trjax.data.sources import describe, load
from trjax.keys import stream_key
from trjax.models.chain import Chain, apply_chain, segment_keys
from trjax.run.loop import BAD_STEP
from trjax.run.saved_model import read_state
from trjax.run.workdir import check_same_run
from trjax.step.program import make_chain, make_prepare
from trjax.step.scores import score
from trjax.trees import name_leaves


@dataclass(frozen=True)
class Finding:
    """The result of one device's block of a batch.

    Attributes:
        micro_batch: from 0.
        device: from 0; with synchronised BatchNorm all of them together count as one.
        where: the first thing that is not finite; empty if everything is.
    """

    micro_batch: int
    device: int
    where: str


def _bad(tree: Mapping[str, Any], what: str) -> str:
    """Returns the name of a leaf that is not finite, of a named tree; empty if there is none."""
    names = [name for name, leaf in name_leaves(tree).items() if not np.isfinite(np.asarray(leaf, np.float32)).all()]
    return f"{what} {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else ""


def find_first(
    chain: Chain, params: Any, batch_stats: Any, inputs: Inputs, block: Batch, key: jax.Array, global_batch: int
) -> str:
    """Returns what is the first in the forward or backward of a block not to be finite; empty if everything is.

    Args:
        chain: the model, with BatchNorm over the block.
        params: `{segment: tree}`.
        batch_stats: likewise.
        inputs: the network's input, and the targets.
        block: its labels and mask.
        key: for dropout and the like.
        global_batch: by which the loss is divided.
    """
    pullbacks: dict[str, Any] = {}
    x, where = inputs.images, "the images"
    try:
        with jax.debug_nans(True):  # names the operation, too
            keys = segment_keys(chain, key, block.indices)
            apply = partial(apply_chain, batch_stats=batch_stats, train=True, mask=block.mask, keys=keys)
            for segment, module in chain.items():
                where = f"forward of {segment}"
                forward = partial(apply, {segment: module})
                x, pullbacks[segment], stats = jax.vjp(forward, {segment: params[segment]}, x, has_aux=True)
                if bad := _bad({segment: {"output": x}}, "") or _bad(stats, "statistics"):
                    return f"{where}: {bad.strip()}"
            where = "the loss"
            loss, pull_loss = jax.vjp(lambda logits: score(logits, block.labels, block.mask, inputs.targets)[0], x)
            if not np.isfinite(loss):
                return f"{where}: {loss}"
            (cotangent,) = pull_loss(jnp.float32(1 / global_batch))
            for segment in reversed(pullbacks):
                where = f"backward of {segment}"
                gradients, cotangent = pullbacks[segment](cotangent)
                if bad := _bad(gradients, "gradient"):
                    return f"{where}: {bad}"
    except FloatingPointError as error:
        return f"{where}: {str(error).splitlines()[0]}"
    return ""


def _read_bad_step(path: Path, config: Config) -> dict[str, Any]:
    try:
        bad = json.loads(path.read_text(encoding="utf-8"))
        numbers = [bad[name] for name in ("step", "epoch", "devices", "checkpoint")]
        devices, indices = bad["devices"], bad["indices"]
        whole = all(type(number) is int and number >= 0 for number in (*numbers, *indices))
        fits = len(indices) <= config.global_batch and max(indices, default=0) < describe(config.data).train_examples
        if not whole or devices < 1 or config.global_batch % devices or not fits:
            raise ValueError("it has numbers that cannot be")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): there is no step to repeat") from error
    return bad


def replay(config: Config) -> list[Finding]:
    """Repeats the step at which the run in `config.workdir` gave up, block by block, op by op.

    Raises:
        ValueError: there is no such run, or no such step.
    """
    path = Path(config.workdir, BAD_STEP)
    if not config.workdir or not path.is_file():
        raise ValueError(f"replay_step with workdir={config.workdir}: no {BAD_STEP} there; the run has not given up")
    bad = _read_bad_step(path, config)
    check_same_run(config, path.parent)
    _, _, state, _ = read_state(path.parent, bad["checkpoint"])
    source, _ = load(config.data, config.seed)
    devices = 1 if config.bn == "sync" else bad["devices"]
    chain = make_chain(replace(config, bn="local"), describe(config.data))
    batch = read_batch(source, np.array(bad["indices"], np.int32), np.arange(config.global_batch), bad["epoch"])
    prepare, findings = make_prepare(config, config.data.size_at(bad["epoch"])), []
    key = jax.random.fold_in(stream_key(config.seed, "dropout"), bad["step"])
    for part in range(config.accumulate * devices):
        size = config.global_batch // (config.accumulate * devices)
        block = Batch(*(leaf[part * size : (part + 1) * size] for leaf in batch))
        micro, device = divmod(part, devices)
        inputs = prepare(block, jnp.int32(bad["epoch"]))
        where = find_first(chain, state.params, state.batch_stats, inputs, block, key, config.global_batch)
        findings.append(Finding(micro, device, where))
    return findings


def format_findings(findings: list[Finding]) -> str:
    """Returns a line for every block, and a conclusion if all are finite.

    >>> print(format_findings([Finding(0, 0, ""), Finding(0, 1, "the loss: nan")]))
    micro-batch 0, device 0: everything is finite
    micro-batch 0, device 1: the loss: nan
    """
    lines = [
        f"micro-batch {found.micro_batch}, device {found.device}: {found.where or 'everything is finite'}"
        for found in findings
    ]
    if not any(found.where for found in findings):
        lines.append("every block is finite by itself: their sum overflows, or only the compiled program is not")
    return "\n".join(lines)
