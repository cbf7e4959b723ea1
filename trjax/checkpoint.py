"""State to disk and back, atomically, at any world size: the last and the best of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from trjax.mesh import REPLICATED, placement
from trjax.state import TrainState

_METRIC = "test_top1"
_UNTESTED = -1.0  # below every accuracy: a checkpoint inside an epoch has none, and orbax wants one of each


def _top1(metrics: dict[str, float]) -> float:
    return metrics[_METRIC]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run, in `folder`, by step; a save that did not finish is never seen."""

    folder: Path
    manager: ocp.CheckpointManager

    @property
    def last_step(self) -> int | None:
        """Step of the last checkpoint."""
        return self.manager.latest_step()

    def top1(self, step: int | None) -> float | None:
        """Test top-1 of a checkpoint; None if it was saved without one."""
        top1 = _UNTESTED if step is None else _top1(self.manager.metrics(step))
        return None if top1 == _UNTESTED else top1

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and test top-1 of the best checkpoint."""
        step = self.manager.best_step()
        top1 = self.top1(step)
        return None if step is None or top1 is None else (step, top1)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, FileNotFoundError) as error:  # what orbax and JSON raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"checkpoints in {folder} cannot be read as this model's ({reason}); they belong to another model, or "
            "one is damaged: use another --workdir, or take the damaged one away"
        ) from error


def open_checkpoints(folder: Path) -> Checkpoints:
    """Opens (or creates) a run's checkpoints.

    Raises:
        ValueError: they cannot be read; names the folder.
    """
    policies = ocp.checkpoint_managers.preservation_policy
    options = ocp.CheckpointManagerOptions(
        best_fn=_top1,
        preservation_policy=policies.AnyPreservationPolicy(
            [policies.LatestN(n=1), policies.BestN(get_metric_fn=_top1, n=1)]
        ),
        # A save in the background reads arrays that the next step, their donee, already overwrites.
        enable_async_checkpointing=False,
        cleanup_tmp_directories=True,
    )
    folder = folder.absolute()
    with _readable(folder):
        return Checkpoints(folder, ocp.CheckpointManager(folder, options=options))


def save(
    checkpoints: Checkpoints,
    state: TrainState,
    position: dict[str, int],
    config: dict[str, Any],
    top1: float | None,
) -> None:
    """Writes a checkpoint of the state at its step, unless that step has one.

    Args:
        checkpoints: the run's.
        state: replicated; written once.
        position: where in the data the run is.
        config: the run's configuration as plain types.
        top1: test top-1 at this step, by which the best is kept; None keeps it only while it is the last.
    """
    step = int(state.step)
    if step in checkpoints.manager.all_steps():
        return
    items = {
        "state": ocp.args.StandardSave(state),
        "position": ocp.args.JsonSave(position),
        "config": ocp.args.JsonSave(config),
    }
    metrics = {_METRIC: _UNTESTED if top1 is None else top1}
    checkpoints.manager.save(step, args=ocp.args.Composite(**items), metrics=metrics)


def restore(
    checkpoints: Checkpoints, shapes: TrainState, mesh: Mesh, formats: Any
) -> tuple[TrainState, dict[str, int]]:
    """Returns the last checkpoint's state, placed on the mesh, and its position in the data.

    Args:
        checkpoints: the run's, at least one saved.
        shapes: of the state.
        mesh: any, also of another world size than the one that saved.
        formats: where each array is to lie.

    Raises:
        ValueError: the checkpoint is damaged or of another model; names the folder.
    """
    where = placement(mesh, REPLICATED)
    targets = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes)
    items = ocp.args.Composite(state=ocp.args.StandardRestore(targets), position=ocp.args.JsonRestore())
    with _readable(checkpoints.folder):
        restored = checkpoints.manager.restore(checkpoints.last_step, args=items)
    return jax.device_put(restored["state"], formats), restored["position"]
