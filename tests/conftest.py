"""Eight CPU devices for every test; sloppy broadcasting and warnings are errors."""

import atexit
import gc
import os
import shutil
import tempfile
from importlib.metadata import version

# Compiling takes most of the suite's time. LLVM need not optimise code that runs once (half of it).
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
# Lowering every fusion through MLIR takes two thirds of the rest. Newer versions know no other way: the gate's part on
# Python 3.12 tests with it.
if version("jaxlib") < "0.11":
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

# What one test has compiled, no other compiles again. Each worker has a folder of its own: JAX writes no file at once.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TRJAX_TEST_CACHE"] = tempfile.mkdtemp(prefix="trjax-tests-")
    atexit.register(shutil.rmtree, os.environ["TRJAX_TEST_CACHE"], ignore_errors=True)
os.environ |= {
    "JAX_COMPILATION_CACHE_DIR": f"{os.environ['TRJAX_TEST_CACHE']}/{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
}

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


def pytest_collection_finish() -> None:
    """Spares the garbage collector its walks over all that imports and compiled programs hold: 3 to 9 % of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
