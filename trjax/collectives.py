"""Moved to `trjax.step.collectives`."""

from trjax.moved import forward

__getattr__ = forward(__name__, "trjax.step.collectives")
