"""Meshes over GPUs that need not be here."""

from jax.experimental import topologies
from jax.sharding import Mesh

from trjax.cost.targets import KIB, Target
from trjax.mesh import mesh_over

_DRIVER, _CUDNN = "12.8.0", (9, 8, 0)  # what jax 0.10 to 0.12 are built for, or accept


def compile_config(target: Target) -> str:
    """Returns the target as XLA's `GpuTargetConfigProto` in text form: what it needs to compile for the GPU.

    Source: the message in XLA's `stream_executor/device_description.proto`.
    """
    major, minor = target.compute_capability
    cudnn = ".".join(map(str, _CUDNN))
    device = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * KIB,
        "shared_memory_per_block_optin": target.shared_memory_bytes - KIB,
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


def make_topology_mesh(target_config: str, hosts: int, gpus_per_host: int) -> Mesh:
    """Returns the mesh over GPUs that need not be there: programs compile for it, and do not run.

    Args:
        target_config: the GPU as text, `compile_config`.
        hosts: machines.
        gpus_per_host: in each.

    Raises:
        ValueError: JAX's CUDA plugin is missing or refuses; says what to install.
    """
    try:
        described = topologies.get_topology_desc(
            platform="cuda", target_config=target_config, topology=f"1x{hosts}x{gpus_per_host}"
        )
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            "compiling for a GPU needs JAX's CUDA plugin (Linux; no driver, no GPU): "
            f"python3 -m pip install 'jax[cuda12]'. JAX says: {reason}"
        ) from error
    return mesh_over(described.devices, hosts)
