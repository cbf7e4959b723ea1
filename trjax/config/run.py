"""Every choice of a run, as one frozen dataclass, checked once."""

import re
from dataclasses import dataclass, field
from typing import Literal

from trjax.config.checks import FORBID, LEAST_RATE, MOST_RATE, check_values, require
from trjax.config.data import DataConfig
from trjax.config.model import ModelConfig
from trjax.config.optim import OptimConfig


def _check_schedule(optim: OptimConfig, epochs: int, global_batch: int) -> None:
    """Raises ValueError where the optimizer's options do not fit those of the run."""
    rate, scale = optim.learning_rate, optim.scale_from_batch  # a root of the ratio is nearer to one
    require(
        not scale or LEAST_RATE <= rate * global_batch / scale <= MOST_RATE,
        f"optim.learning_rate={rate} with global_batch={global_batch} and optim.scale_from_batch={scale}",
        f"the scaled rate must be from {LEAST_RATE:g} to {MOST_RATE:g}",
    )
    require(
        optim.warmup_epochs <= epochs,
        f"optim.warmup_epochs={optim.warmup_epochs} with epochs={epochs}",
        "the warm-up must end within the run; pass --optim.warmup-epochs",
    )
    require(
        all(optim.warmup_epochs <= epoch < epochs for epoch in optim.milestones),
        f"optim.milestones={optim.milestones} with epochs={epochs}",
        "each must lie between the end of the warm-up and the end of the run; pass --optim.milestones",
    )


Reducing = Literal["two_group", "auto", "single", "per_leaf", "ddp", "ddp_initial", "ring", "hierarchical", "zero1"]
"""Ways of summing gradients, `reducers.py`."""


Metric = Literal["test/top1", "test/top5", "test/loss", "ema/top1", "ema/top5", "ema/loss"]
"""What an evaluation comes to."""


@dataclass(frozen=True)
class Config:
    """A whole run."""

    __pydantic_config__ = FORBID

    preset: str = "custom"
    """Recipe to start from: one of the list above."""
    devices: str = "all"
    """Devices of this machine: `all`, `0-3` or `0,2,5`; on the CPU, that many are made."""
    platform: Literal["auto", "cpu", "cuda"] = "auto"
    """Auto: cuda where an NVIDIA driver is present, else cpu."""
    global_batch: int = 96
    """Examples per step over all devices; must be divisible by their number."""
    epochs: int = 30
    """Times that every training example is seen."""
    seed: int = 0
    """Fixes initial parameters, data order and augmentation."""
    bn: Literal["local", "sync", "rank0"] = "local"
    """BatchNorm over each device's batch, or over the global batch; running statistics: the mean over the devices,
    with rank0 those of the first device, as DistributedDataParallel keeps them."""
    reducer: Reducing = "two_group"
    """How gradients are summed. Auto: in groups that the link is predicted to need; ddp: in PyTorch's buckets, as
    rebuilt after its first step (ddp_initial: as first assigned); ring, hierarchical: written out; zero1: to shards,
    whose owner updates them."""
    bucket_mb: float = 25.0
    """MiB of a bucket of ddp; the first one filled holds at most 1, whatever this is."""
    comm_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which gradients are summed; they are divided by the global batch before, so that sums fit."""
    accumulate: int = 1
    """Micro-batches of a step, one after the other: the memory of one, one sum over the devices for all."""
    remat: Literal["none", "stage", "block"] = "none"
    """Compute the inside of every stage or residual block again in the backward, in place of keeping it: memory for
    time; explain step has both. Of a chain of one's own, a block is a segment, and a stage those in a row whose names
    are the same up to the last underscore."""
    freeze: tuple[str, ...] = ()
    """Parameters that stay as they are: kinds of region (G_FIRST_CONV) or patterns of names (stage1*/conv*)."""
    last_batch: Literal["pad", "drop"] = "pad"
    """What becomes of a last batch with fewer examples: padding that counts for nothing, or it is left out."""
    overfit_batches: int = 0
    """Batches of the first training examples, to train on alone and be tested on: what is sound learns them by heart;
    0: all examples."""
    hosts: int = 0
    """Hosts that the devices are said to lie on, for hierarchical; 0: as many as there are."""
    nccl: tuple[str, ...] = ()
    """NAME=VALUE pairs for NCCL's environment (NCCL_ALGO=Ring), set before it starts and kept with the run."""
    link_gbytes: float = 0.0
    """GB/s that the slowest link between the GPUs reaches, for auto and for predictions; 0: the data sheet's."""
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = "float32"
    """Type to compute in; parameters, statistics and reductions stay float32. Tf32 is float32 with fewer digits in
    convolutions, on GPUs; with float16 the loss is scaled, by as much as gradients allow."""
    steps_per_dispatch: int = 1
    """Steps that the devices do by themselves before the host speaks again: for small models; stops come behind all."""
    deterministic: bool = False
    """On GPUs: only kernels and AllReduces that give the same bits in every run, at some cost; the CPU always does."""
    keep: int = 2
    """Last checkpoints to keep, beside the best one."""
    best_by: Metric = "test/top1"
    """What makes a checkpoint the best: largest, or of a loss smallest; ema: of the running means."""
    save_every: int = 0
    """Steps between two checkpoints; 0: at the end of every epoch, where there is always one."""
    max_bad_steps: int = 10
    """Steps in a row whose gradients are not finite, and which change nothing, before the run gives up; 0: never."""
    watchdog_seconds: float = 1800.0
    """The process ends, with the stack of every thread, when no step has finished for so long; 0: never."""
    profile_steps: str = ""
    """First and last step of a profile, 20:25 for instance: printed, and kept in profile/ in the run's folder."""
    keep_compiled: bool = True
    """Keep compiled programs in .trjax-cache beside the run's folder, so that a second start need not compile (of one
    process alone); where JAX has a cache (JAX_COMPILATION_CACHE_DIR), that one is used."""
    tensorboard: bool = False
    """Write the records for TensorBoard too, to tensorboard/ in the run's folder."""
    log_every: int = 50
    """Steps between two training lines in the records; the end of an epoch always writes one."""
    init_from: str = ""
    """File of weights to start from, .safetensors or .pth, by torchvision's names; a head of another size stays."""
    workdir: str = ""
    """Folder of the run, resumed when it exists; empty: a new one under runs/."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    @property
    def profiled(self) -> tuple[int, int]:
        """The first and the last step to profile; (0, 0): none.

        >>> Config(profile_steps="20:25").profiled
        (20, 25)
        """
        match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", self.profile_steps)
        return (int(match[1]), int(match[2])) if match else (0, 0)

    def _check_dispatch(self) -> None:
        """Raises ValueError where several steps of a call do not go with other options."""
        require(
            self.steps_per_dispatch == 1 or not 0 < self.max_bad_steps < 2 * self.steps_per_dispatch,
            f"steps_per_dispatch={self.steps_per_dispatch} with max_bad_steps={self.max_bad_steps}",
            "must be at most half of the bad steps after which the run gives up",
        )
        require(
            not 0 < self.save_every < self.steps_per_dispatch,
            f"steps_per_dispatch={self.steps_per_dispatch} with save_every={self.save_every}",
            "no checkpoint comes between the steps of a call; use fewer of them",
        )
        require(
            self.steps_per_dispatch == 1 or not self.data.sizes,
            f"steps_per_dispatch={self.steps_per_dispatch} with data.sizes={self.data.sizes}",
            "images that grow are for models that are not small; leave one of them out",
        )

    def __post_init__(self) -> None:
        check_values(self)
        for option in ("global_batch", "epochs", "accumulate", "keep", "log_every", "steps_per_dispatch"):
            require(getattr(self, option) > 0, f"{option}={getattr(self, option)}", "must be positive")
        for option in ("bucket_mb", "overfit_batches", "hosts", "save_every", "max_bad_steps"):
            require(getattr(self, option) >= 0, f"{option}={getattr(self, option)}", "must not be negative")
        require(0 <= self.seed < 2**32, f"seed={self.seed}", "must be in [0, 2^32)")
        require(
            self.link_gbytes == 0 or 1e-6 <= self.link_gbytes <= 1e6,
            f"link_gbytes={self.link_gbytes}",
            "must be positive, from 1e-06 to 1e+06, or 0 to look it up",
        )
        first, last = self.profiled
        require(
            not self.profile_steps or 0 < first <= last,
            f"profile_steps={self.profile_steps}",
            "must be the first and the last step of the profile, 20:25 for instance",
        )
        for pair in self.nccl:
            name, _, value = pair.partition("=")
            require(
                name.startswith("NCCL_") and name != "NCCL_" and bool(value),
                f"nccl={pair!r}",
                "write NCCL_NAME=VALUE, NCCL_ALGO=Ring for instance",
            )
        require(
            0 <= self.watchdog_seconds <= 1e9,
            f"watchdog_seconds={self.watchdog_seconds}",
            "must be positive, at most 1e+09, or 0 for none",
        )
        require(
            self.optim.ema_decay > 0 or not self.best_by.startswith("ema/"),
            f"best_by={self.best_by} with optim.ema_decay={self.optim.ema_decay}",
            "there are no running means; pass --optim.ema-decay",
        )
        require(
            max(self.data.size_epochs, default=0) < self.epochs,
            f"data.size_epochs={self.data.size_epochs} with epochs={self.epochs}",
            "images must come in their own size in the end; pass --data.size-epochs",
        )
        self._check_dispatch()
        _check_schedule(self.optim, self.epochs, self.global_batch)
