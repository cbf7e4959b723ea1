"""Eight CPU devices for every test; sloppy broadcasting and warnings are errors."""

import os

# Compiling takes most of the suite's time, and half of that is LLVM making code fast that runs once.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("trjax", deadline=None)  # a loaded machine is not a failure
hypothesis.settings.load_profile("trjax")

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.devices()  # makes the eight, before a test that goes through `main` asks for fewer


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    """Runs every test in a folder of its own, since `runs/` is made in the current one."""
    monkeypatch.chdir(tmp_path)
