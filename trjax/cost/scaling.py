"""What exposed communication costs at scale."""


def predict_efficiency(compute_seconds: float, exposed_seconds: float) -> float:
    """Returns a device's share of the throughput that it has alone, where nothing is exposed.

    >>> predict_efficiency(3.0, 1.0)
    0.75
    """
    return compute_seconds / (compute_seconds + exposed_seconds)


def predict_speedup(world_size: int, compute_seconds: float, exposed_seconds: float) -> float:
    """Returns how many single devices do as much: 256 whose steps take twice as long do the work of 128.

    >>> predict_speedup(256, 0.1, 0.1)
    128.0
    """
    return world_size * predict_efficiency(compute_seconds, exposed_seconds)
