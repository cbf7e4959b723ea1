"""GPUs and their links as data-sheet numbers, and the text that XLA compiles for them from.

Sources, read in November 2026: NVIDIA's data sheets and architecture white papers "A100 Tensor Core GPU" (2020),
"H100 Tensor Core GPU" (2022), "H200 Tensor Core GPU" (2024), "Blackwell architecture" and "HGX B200" (2024); block and
register limits from the CUDA C++ Programming Guide's table of compute capabilities. Rates are dense, without
sparsity. Links count one direction; NVIDIA quotes both together. The network is that of NVIDIA's own nodes:
per GPU one 400 Gb/s port (DGX H100, H200, B200) or 200 Gb/s (DGX A100).
"""

from dataclasses import dataclass

_GB, _TERA, _KIB, _MIB, _GIB = 1e9, 1e12, 2**10, 2**20, 2**30


@dataclass(frozen=True)
class Target:
    """One kind of GPU.

    Attributes:
        name: as `--target` takes it.
        device_kind: as its driver calls it.
        compute_capability: major, minor.
        num_cores: streaming multiprocessors.
        fpus_per_core: float32 units of each.
        clock_ghz: boost clock.
        shared_memory_bytes: of one multiprocessor; a block may have 1 KiB less.
        l2_bytes: of the level-2 cache.
        memory_bytes: of the device.
        memory_bytes_per_second: peak.
        flops_per_second: peak by element type.
        nvlink_bytes_per_second: to the other GPUs of the host, one direction.
        network_bytes_per_second: to other hosts, for each GPU, one direction.
    """

    name: str
    device_kind: str
    compute_capability: tuple[int, int]
    num_cores: int
    fpus_per_core: int
    clock_ghz: float
    shared_memory_bytes: int
    l2_bytes: int
    memory_bytes: int
    memory_bytes_per_second: float
    flops_per_second: dict[str, float]
    nvlink_bytes_per_second: float
    network_bytes_per_second: float


def _rates(half: float, single: float) -> dict[str, float]:
    return {"bf16": half * _TERA, "f16": half * _TERA, "f32": single * _TERA}


TARGETS = {
    target.name: target
    for target in (
        Target("a100", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 164 * _KIB, 40 * _MIB, 80 * _GIB,
               2039 * _GB, _rates(312, 19.5), 300 * _GB, 25 * _GB),
        Target("h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 228 * _KIB, 50 * _MIB, 80 * _GIB,
               3350 * _GB, _rates(989, 67), 450 * _GB, 50 * _GB),
        Target("h200", "NVIDIA H200", (9, 0), 132, 128, 1.98, 228 * _KIB, 50 * _MIB, 141 * 10**9,
               4800 * _GB, _rates(989, 67), 450 * _GB, 50 * _GB),
        Target("b200", "NVIDIA B200", (10, 0), 148, 128, 1.965, 228 * _KIB, 126 * _MIB, 180 * 10**9,
               8000 * _GB, _rates(2250, 75), 900 * _GB, 50 * _GB),
    )
}  # fmt: skip
"""All targets by name."""

CPU = Target("cpu", "cpu", (0, 0), 1, 16, 3.0, 0, 32 * _MIB, 16 * _GIB, 20 * _GB, _rates(0.1, 0.2), 5 * _GB, 1 * _GB)
"""A stand-in for a few cores of a server, not measured: what the cost model takes where there is no GPU."""

_DRIVER, _CUDNN = "12.8.0", (9, 8, 0)  # what jax 0.10 to 0.12 are built for, or accept


def find_target(name: str) -> Target:
    """Returns a target by the name that `--target` takes.

    Raises:
        ValueError: unknown name; lists the known ones.
    """
    if name not in TARGETS:
        raise ValueError(f"target={name!r} is unknown; known: {', '.join(TARGETS)}")
    return TARGETS[name]


def target_of_device(device_kind: str) -> Target:
    """Returns the target that a device is, the nearest by name; `CPU` for anything that is no known GPU.

    >>> target_of_device("NVIDIA H200").name, target_of_device("cpu").name
    ('h200', 'cpu')
    """
    return next((target for name, target in TARGETS.items() if name in device_kind.lower()), CPU)


def compile_config(target: Target) -> str:
    """Returns the target as XLA's `GpuTargetConfigProto` in text form: what it needs to compile for the GPU.

    Source: the message in XLA's `stream_executor/device_description.proto`.
    """
    major, minor = target.compute_capability
    cudnn = ".".join(map(str, _CUDNN))
    device = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * _KIB,
        "shared_memory_per_block_optin": target.shared_memory_bytes - _KIB,
        "shared_memory_per_core": target.shared_memory_bytes,
        "threads_per_core_limit": 2048,
        "core_count": target.num_cores,
        "fpus_per_core": target.fpus_per_core,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": round(target.memory_bytes_per_second),
        "l2_cache_size": target.l2_bytes,
        "clock_rate_ghz": target.clock_ghz,
        "device_memory_size": target.memory_bytes,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "driver_version": f'"{_DRIVER}"',
        "runtime_version": f'"{_DRIVER}"',
        "dnn_version": f'"{cudnn}"',
    }
    fields = "\n".join(f"  {name}: {value}" for name, value in device.items())
    return (
        f"gpu_device_info {{\n{fields}\n  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
        f'platform_name: "CUDA"\ndnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} patch: {_CUDNN[2]} }}\n'
        f'device_description_str: "{target.device_kind}"\n'
    )
