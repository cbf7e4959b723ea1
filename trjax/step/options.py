"""Compile options of trjax's own programs: what the trainer chooses from its configuration and its plan."""

from jax.sharding import Mesh

from trjax.config.run import Config
from trjax.step.plan import Plan
from trjax.step.reducers import Reducer
from trjax.xla.options import CompileOptions, CompilerOptions, find_known_options

USER_BUFFERS = "xla_gpu_enable_nccl_user_buffers"

_BY_PLATFORM: dict[str, CompileOptions] = {
    "cpu": {
        # Barriers are gone when the CPU's combiner runs, and it would merge the groups into one late AllReduce.
        "xla_disable_hlo_passes": "cpu-all-reduce-combiner",
        # YNNPACK's convolutions take twice as long as Eigen's, and those of filter gradients thirty times.
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
        # CPU devices share the cores and so arrive far apart when a step is long.
        "xla_cpu_collective_call_terminate_timeout_seconds": 600,
    },
    "gpu": {
        # The default on Hopper, not on Ampere: without it every collective blocks.
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # The scheduler works from the end of the program; these two let a group start where it is complete.
        "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
        "xla_gpu_experimental_collective_start_as_early_as_possible": True,
        # Groups are chosen by the plan; the combiner's threshold of 30 MiB would merge small ones.
        "xla_gpu_all_reduce_combine_threshold_bytes": 0,
        # All AllReduce buffers in one allocation of their own, which NCCL registers once.
        USER_BUFFERS: True,
        # XLA's defaults, and with them convolutions and collectives: the whole step replays as CUDA graphs.
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONVOLUTION,COLLECTIVES",
    },
}

DETERMINISTIC: dict[str, CompileOptions] = {
    # Every kernel whose result depends on the order in which threads add is refused or replaced, and none is chosen
    # by how long it took.
    "gpu": {
        "xla_gpu_deterministic_ops": True,
        "xla_gpu_exclude_nondeterministic_ops": True,
        "xla_gpu_autotune_level": 0,
    },
}
"""Options of `--deterministic`, beside those of the platform; the CPU needs none."""
_DETERMINISTIC_NCCL = ("NCCL_ALGO=Ring", "NCCL_PROTO=Simple")  # one order of sums, whatever the message and the load

INIT_OPTIONS: dict[str, CompileOptions] = {"cpu": {"xla_backend_optimization_level": 0}}
"""Options of the initialisation: it runs once, and optimising its random bits takes longer than drawing them."""


def nccl_settings(config: Config) -> tuple[str, ...]:
    """Returns the NAME=VALUE pairs for NCCL's environment; the user's pairs come last, and so win."""
    return (*(_DETERMINISTIC_NCCL if config.deterministic else ()), *config.nccl)


def probe_options(mesh: Mesh, deterministic: bool = False) -> CompilerOptions:
    """Returns the options of the mesh's platform that its compiler knows.

    Args:
        mesh: the devices; those of a topology description will do.
        deterministic: add the options that give the same bits in every run.
    """
    platform = mesh.devices.flat[0].platform
    added = DETERMINISTIC.get(platform, {}) if deterministic else {}
    return find_known_options(mesh, tuple({**_BY_PLATFORM.get(platform, {}), **added}.items()))


def train_step_options(config: Config, reducer: Reducer, plan: Plan, mesh: Mesh) -> CompileOptions | None:
    """Returns the options of the train step; None leaves the compiler its own.

    An ordinary step gets none but those that determinism needs.

    A group that is one float32 kernel alone is not copied into its buffer: the convolution would have to write where
    NCCL's buffers are, and XLA knows no such layout. They then lie wherever there is room.
    """
    if reducer.ordinary:
        wanted = DETERMINISTIC.get(mesh.devices.flat[0].platform, {}) if config.deterministic else {}
        return find_known_options(mesh, tuple(wanted.items())).accepted if wanted else None
    options = probe_options(mesh, config.deterministic).accepted
    lone = any(len(group.regions) == 1 and len(group.regions[0].shape) == 4 for group in plan.groups)
    if not lone or config.precision not in ("float32", "tf32"):
        return options
    return {name: value for name, value in options.items() if name != USER_BUFFERS}
