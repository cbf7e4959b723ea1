"""How large a run is; one that cannot be is refused before anything compiles."""

import math
from typing import Any

import jax
from jax.sharding import Mesh

from trjax.config.run import Config
from trjax.data.spec import DataSpec
from trjax.memory import require_memory

_MAX_STEPS = 10**8
"""Of a run: their learning rates, 0.4 GB, lie on every device."""
SMALLER = "use a smaller batch, model or image, --accumulate, --remat stage, or --reducer zero1"
"""What to do where memory is too small."""


def count_examples(config: Config, spec: DataSpec) -> int:
    """Returns the number of examples of an epoch.

    Raises:
        ValueError: the run asks for more than there are.
    """
    wanted = config.overfit_batches * config.global_batch
    if wanted > spec.train_examples:
        raise ValueError(
            f"overfit_batches={config.overfit_batches} with global_batch={config.global_batch}: these are {wanted:,} "
            f"examples, and there are {spec.train_examples:,}; use fewer"
        )
    return wanted or spec.train_examples


def check_size(config: Config, mesh: Mesh, params: Any, spec: DataSpec, num_steps: int) -> None:
    """Raises ValueError for a run that cannot fit, whatever it compiles to; a GPU says so itself."""
    if num_steps > _MAX_STEPS:
        raise ValueError(
            f"epochs={config.epochs} with global_batch={config.global_batch}: {num_steps:,} steps are more than "
            f"{_MAX_STEPS:,}; use fewer epochs or a larger batch"
        )
    if config.steps_per_dispatch > num_steps // config.epochs:
        raise ValueError(
            f"steps_per_dispatch={config.steps_per_dispatch} with {num_steps // config.epochs} steps an epoch: "
            "the end of an epoch ends a call; use fewer"
        )
    if config.profiled[0] > num_steps:
        raise ValueError(f"profile_steps={config.profile_steps}: the run ends after step {num_steps:,}")
    first_drop = min(config.optim.milestones, default=config.epochs) * num_steps / config.epochs
    if config.optim.warmup_steps > first_drop:
        raise ValueError(
            f"optim.warmup_steps={config.optim.warmup_steps} with {num_steps:,} steps in all: the warm-up must end "
            "within the run, and before its first milestone; use fewer, or more epochs"
        )
    if mesh.devices.flat[0].platform == "cpu":
        own = len(mesh.local_devices)
        elements = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
        pixels = config.global_batch * math.prod(spec.image_shape) * own / mesh.size
        # Parameters and gradients are float32. Pixels are there as bytes, and as float32 for one micro-batch.
        needed_bytes = own * elements * 2 * 4 + pixels * (1 + 4 / config.accumulate)
        require_memory(
            f"global_batch={config.global_batch} on {own} of the CPU's devices, with {elements:,} parameters on each",
            needed_bytes,
            SMALLER,
        )
