"""Every choice of a run: options, presets, TOML. It may use the leaves `text` and `moved`, and no JAX."""

from trjax.moved import forward

__getattr__ = forward(__name__, "trjax.config.data", "trjax.config.model", "trjax.config.optim", "trjax.config.run")
