"""A data-parallel trainer for image classifiers that knows what its step compiles to: the public names."""

from importlib import import_module
from typing import Any

_HOMES = {
    "BatchNorm": "trjax.models.batchnorm",
    "Chain": "trjax.models.chain",
    "Config": "trjax.config.run",
    "fit": "trjax.run.fit",
}
__all__ = ["BatchNorm", "Chain", "Config", "fit"]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: `import trjax` alone loads no JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'trjax' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
