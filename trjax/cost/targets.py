"""GPUs and their links as data-sheet numbers, and the text that XLA compiles for them from.

Sources, read in November 2026: NVIDIA's data sheets and architecture white papers "A100 Tensor Core GPU" (2020),
"H100 Tensor Core GPU" (2022), "H200 Tensor Core GPU" (2024), "Blackwell architecture" and "HGX B200" (2024); block and
register limits from the CUDA C++ Programming Guide's table of compute capabilities. Rates are dense, without
sparsity. Links count one direction; NVIDIA quotes both together. The network is that of NVIDIA's own nodes:
per GPU one 400 Gb/s port (DGX H100, H200, B200) or 200 Gb/s (DGX A100).
"""

from dataclasses import dataclass

KIB = 2**10
_GB, _TERA, _MIB, _GIB = 1e9, 1e12, 2**20, 2**30


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
        Target("a100", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 164 * KIB, 40 * _MIB, 80 * _GIB,
               2039 * _GB, _rates(312, 19.5), 300 * _GB, 25 * _GB),
        Target("h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 228 * KIB, 50 * _MIB, 80 * _GIB,
               3350 * _GB, _rates(989, 67), 450 * _GB, 50 * _GB),
        Target("h200", "NVIDIA H200", (9, 0), 132, 128, 1.98, 228 * KIB, 50 * _MIB, 141 * 10**9,
               4800 * _GB, _rates(989, 67), 450 * _GB, 50 * _GB),
        Target("b200", "NVIDIA B200", (10, 0), 148, 128, 1.965, 228 * KIB, 126 * _MIB, 180 * 10**9,
               8000 * _GB, _rates(2250, 75), 900 * _GB, 50 * _GB),
    )
}  # fmt: skip
"""All targets by name."""

CPU = Target("cpu", "cpu", (0, 0), 1, 16, 3.0, 0, 32 * _MIB, 16 * _GIB, 20 * _GB, _rates(0.1, 0.2), 5 * _GB, 1 * _GB)
"""A stand-in for a few cores of a server, not measured: what the cost model takes where there is no GPU."""


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
