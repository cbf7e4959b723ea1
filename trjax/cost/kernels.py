"""Seconds of a kernel: the roofline."""

from trjax.cost.targets import Target

MEMORY_EFFICIENCY = 0.835
"""Share of the peak memory rate that streaming kernels reach: 2.8 of 3.35 TB/s on H100."""
MATH_EFFICIENCY = 0.556
"""Share of the peak arithmetic rate that ResNet's convolutions reach: 550 of 989 TFLOP/s in bf16 on H100."""
LAUNCH_SECONDS = 2e-6
"""From one kernel to the next on a GPU, launched by a stream."""


def predict_kernel(size_bytes: float, flops: float, dtype: str, target: Target) -> float:
    """Returns the seconds of one kernel on a GPU, its launch included.

    Args:
        size_bytes: read and written in device memory.
        flops: multiplications and additions of convolutions and matrix products; others are not counted.
        dtype: of the operands, which sets the rate: bf16, f16, f32 (cuDNN may take the faster TF32).
        target: the GPU.
    """
    memory = size_bytes / (target.memory_bytes_per_second * MEMORY_EFFICIENCY)
    rate = target.flops_per_second.get(dtype, target.flops_per_second["f32"])
    return LAUNCH_SECONDS + max(memory, flops / (rate * MATH_EFFICIENCY))
