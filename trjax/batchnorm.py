"""Moved to `trjax.models.batchnorm`."""

from trjax.moved import forward

__getattr__ = forward(__name__, "trjax.models.batchnorm")
