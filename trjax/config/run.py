"""Every choice of a run, as one frozen dataclass, checked once."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from trjax.config.checks import Checked
from trjax.config.data import DataConfig
from trjax.config.fields import MAY_CHANGE, NonNegativeFloat32, NonNegativeInt32, PositiveInt32, Text, rule, zero_or
from trjax.config.model import ModelConfig
from trjax.config.optim import LEAST_RATE, MOST_RATE, OptimConfig

_NCCL = rule(lambda pair: re.match("NCCL_[^=]+=.", pair), "write NCCL_NAME=VALUE, NCCL_ALGO=Ring for instance")
Reducing = Literal["two_group", "auto", "single", "per_leaf", "ddp", "ddp_initial", "ring", "hierarchical", "zero1"]
"""Ways of summing gradients, `reducers.py`."""


Metric = Literal["test/top1", "test/top5", "test/loss", "ema/top1", "ema/top5", "ema/loss"]
"""What an evaluation comes to."""


@dataclass(frozen=True)
class Config(Checked):
    """A whole run."""

    preset: Annotated[Text, MAY_CHANGE] = "custom"
    """Recipe to start from: one of the list above."""
    devices: Annotated[Text, MAY_CHANGE] = "all"
    """Devices of this machine: `all`, `0-3` or `0,2,5`; on the CPU, that many are made."""
    platform: Annotated[Literal["auto", "cpu", "cuda"], MAY_CHANGE] = "auto"
    """Auto: cuda where an NVIDIA driver is present, else cpu."""
    global_batch: PositiveInt32 = 96
    """Examples per step over all devices; must be divisible by their number."""
    epochs: Annotated[PositiveInt32, MAY_CHANGE] = 30
    """Times that every training example is seen."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Fixes initial parameters, data order and augmentation."""
    bn: Literal["local", "sync", "rank0"] = "local"
    """BatchNorm over each device's batch, or over the global batch; running statistics: the mean over the devices,
    with rank0 those of the first device, as DistributedDataParallel keeps them."""
    reducer: Annotated[Reducing, MAY_CHANGE] = "two_group"
    """How gradients are summed. Auto: in groups that the link is predicted to need; ddp: in PyTorch's buckets, as
    rebuilt after its first step (ddp_initial: as first assigned); ring, hierarchical: written out; zero1: to shards,
    whose owner updates them."""
    bucket_mb: Annotated[NonNegativeFloat32, MAY_CHANGE] = 25.0
    """MiB of a bucket of ddp; the first one filled holds at most 1, whatever this is."""
    comm_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which gradients are summed; they are divided by the global batch before, so that sums fit."""
    accumulate: PositiveInt32 = 1
    """Micro-batches of a step, one after the other: the memory of one, one sum over the devices for all."""
    remat: Annotated[Literal["none", "stage", "block"], MAY_CHANGE] = "none"
    """Compute the inside of every stage or residual block again in the backward, in place of keeping it: memory for
    time; explain step has both. Of a chain of one's own, a block is a segment, and a stage those in a row whose names
    are the same up to the last underscore."""
    freeze: tuple[Text, ...] = ()
    """Parameters that stay as they are: kinds of region (G_FIRST_CONV) or patterns of names (stage1*/conv*)."""
    last_batch: Literal["pad", "drop"] = "pad"
    """What becomes of a last batch with fewer examples: padding that counts for nothing, or it is left out."""
    overfit_batches: NonNegativeInt32 = 0
    """Batches of the first training examples, to train on alone and be tested on: what is sound learns them by heart;
    0: all examples."""
    hosts: Annotated[NonNegativeInt32, MAY_CHANGE] = 0
    """Hosts that the devices are said to lie on, for hierarchical; 0: as many as there are."""
    nccl: Annotated[tuple[Annotated[Text, _NCCL], ...], MAY_CHANGE] = ()
    """NAME=VALUE pairs for NCCL's environment (NCCL_ALGO=Ring), set before it starts and kept with the run."""
    link_gbytes: Annotated[float, zero_or(1e-6, 1e6, "to use the data sheet"), MAY_CHANGE] = 0.0
    """GB/s that the slowest link between the GPUs reaches, for auto and for predictions; 0: the data sheet's."""
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = "float32"
    """Type to compute in; parameters, statistics and reductions stay float32. Tf32 is float32 with fewer digits in
    convolutions, on GPUs; with float16 the loss is scaled, by as much as gradients allow."""
    steps_per_dispatch: Annotated[PositiveInt32, MAY_CHANGE] = 1
    """Steps that the devices do by themselves before the host speaks again: for small models; stops come behind all."""
    deterministic: Annotated[bool, MAY_CHANGE] = False
    """On GPUs: only kernels and AllReduces that give the same bits in every run, at some cost; the CPU always does."""
    keep: Annotated[PositiveInt32, MAY_CHANGE] = 2
    """Last checkpoints to keep, beside the best one."""
    best_by: Metric = "test/top1"
    """What makes a checkpoint the best: largest, or of a loss smallest; ema: of the running means."""
    save_every: Annotated[NonNegativeInt32, MAY_CHANGE] = 0
    """Steps between two checkpoints; 0: at the end of every epoch, where there is always one."""
    max_bad_steps: Annotated[NonNegativeInt32, MAY_CHANGE] = 10
    """Steps in a row whose gradients are not finite, and which change nothing, before the run gives up; 0: never."""
    watchdog_seconds: Annotated[float, Field(ge=0, le=1e9), MAY_CHANGE] = 1800.0
    """The process ends, with the stack of every thread, when no step has finished for so long; 0: never."""
    profile_steps: Annotated[Text, MAY_CHANGE] = ""
    """First and last step of a profile, 20:25 for instance: printed, and kept in profile/ in the run's folder."""
    keep_compiled: Annotated[bool, MAY_CHANGE] = True
    """Keep compiled programs in .trjax-cache beside the run's folder, so that a second start need not compile (of one
    process alone); where JAX has a cache (JAX_COMPILATION_CACHE_DIR), that one is used."""
    tensorboard: Annotated[bool, MAY_CHANGE] = False
    """Write the records for TensorBoard too, to tensorboard/ in the run's folder."""
    log_every: Annotated[PositiveInt32, MAY_CHANGE] = 50
    """Steps between two training lines in the records; the end of an epoch always writes one."""
    init_from: Annotated[Text, MAY_CHANGE] = ""
    """File of weights to start from, .safetensors or .pth, by torchvision's names; a head of another size stays."""
    workdir: Annotated[Text, MAY_CHANGE] = ""
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

    def check_rules(self) -> None:
        """Raises ValueError if options do not fit each other."""
        self._check_profile()
        self._check_best_by()
        self._check_sizes_end()
        self._check_dispatch()
        self._check_scaled_rate()
        self._check_schedule()

    def _check_profile(self) -> None:
        first, last = self.profiled
        if self.profile_steps and not 0 < first <= last:
            why = "must be the first and the last step of the profile, 20:25 for instance"
            raise self.conflict("profile_steps", why=why)

    def _check_best_by(self) -> None:
        if self.best_by.startswith("ema/") and self.optim.ema_decay == 0:
            why = "there are no running means; pass --optim.ema-decay"
            raise self.conflict("best_by", "optim.ema_decay", why=why)

    def _check_sizes_end(self) -> None:
        if max(self.data.size_epochs, default=0) >= self.epochs:
            why = "the last epochs must use images of full size; pass --data.size-epochs"
            raise self.conflict("data.size_epochs", "epochs", why=why)

    def _check_dispatch(self) -> None:
        if self.steps_per_dispatch > 1 and 0 < self.max_bad_steps < 2 * self.steps_per_dispatch:
            why = "must be at most half of max_bad_steps; pass a smaller --steps-per-dispatch"
            raise self.conflict("steps_per_dispatch", "max_bad_steps", why=why)
        if 0 < self.save_every < self.steps_per_dispatch:
            why = "no checkpoint is saved between the steps of a call; pass a smaller --steps-per-dispatch"
            raise self.conflict("steps_per_dispatch", "save_every", why=why)
        if self.steps_per_dispatch > 1 and self.data.sizes:
            why = "the steps of a call have images of one size; pass --steps-per-dispatch 1"
            raise self.conflict("steps_per_dispatch", "data.sizes", why=why)

    def _check_scaled_rate(self) -> None:
        rate, scale = self.optim.learning_rate, self.optim.scale_from_batch  # a root of the ratio is nearer to one
        if scale and not LEAST_RATE <= rate * self.global_batch / scale <= MOST_RATE:
            why = f"the scaled rate must be from {LEAST_RATE:g} to {MOST_RATE:g}"
            raise self.conflict("optim.learning_rate", "global_batch", "optim.scale_from_batch", why=why)

    def _check_schedule(self) -> None:
        if self.optim.warmup_epochs > self.epochs:
            why = "the warm-up must end within the run; pass --optim.warmup-epochs"
            raise self.conflict("optim.warmup_epochs", "epochs", why=why)
        if not all(self.optim.warmup_epochs <= epoch < self.epochs for epoch in self.optim.milestones):
            why = "each must lie between the end of the warm-up and the end of the run; pass --optim.milestones"
            raise self.conflict("optim.milestones", "epochs", why=why)
