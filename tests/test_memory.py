import platform
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import attempt, dense_chain, tiny_config

from trjax import memory
from trjax.config.run import Config, DataConfig, ModelConfig
from trjax.data.sources import load
from trjax.memory import present_bytes, require_memory
from trjax.mesh import make_mesh
from trjax.step.compile import compile_program
from trjax.step.program import make_program


def test_a_container_may_leave_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_LIMIT_FILE", Path("limit"))
    whole = present_bytes()
    assert whole > 10**8
    for text, present in (("1000000\n", 1_000_000), ("max\n", whole), (f"{whole * 2}\n", whole)):
        Path("limit").write_text(text)
        assert present_bytes() == present


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "present_bytes", lambda: 2_000_000_000)
    require_memory("epochs=3", 2_000_000_000, "use fewer")
    with pytest.raises(ValueError, match=r"^epochs=3: needs 2.5 GB of memory, of which there are 2.0; use fewer$"):
        require_memory("epochs=3", 2_500_000_000, "use fewer")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(epochs=2**31 - 1), r"epochs=2147483647 with global_batch=96: 32,212,254,705 steps are more than"),
        (Config(global_batch=2**30), r"global_batch=1073741824 on 8 of the CPU's devices, .* use a smaller batch"),
        (Config(model=ModelConfig(width=2**16)), r"with 1,236,\d+,\d+,\d+ parameters on each: needs"),
        (Config(data=DataConfig(crop_padding=8)), r"data.crop_padding=8 with images of 8x8: must be less"),
        (
            Config(data=DataConfig(source="synthetic", image_shape=(2**15, 2**15, 1))),
            r"global_batch=96 on 8 .*: needs 515.4 GB",
        ),
    ],
)
def test_runs_that_cannot_fit(config: Config, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "present_bytes", lambda: 10**11)
    with pytest.raises(ValueError, match=message):
        make_program(config, make_mesh("0-7"))


@pytest.mark.parametrize("option", ["train_examples", "test_examples", "num_classes"])
def test_synthetic_examples_that_cannot_fit(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "present_bytes", lambda: 10**11)
    with pytest.raises(ValueError, match=rf"synthetic with .*: needs .* use fewer or smaller ones: .*data.{option}"):
        load(DataConfig(source="synthetic", **{option: 2**31 - 1}))  # type: ignore[arg-type]


def test_a_step_that_does_not_fit_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    program = make_program(tiny_config(), make_mesh("0-1"), dense_chain())
    monkeypatch.setattr(memory, "present_bytes", lambda: 10_000)
    _, problem = attempt(lambda: compile_program(program))
    assert problem.startswith("global_batch=24: needs 0.0 GB of memory on each of 2 cpu devices, which has 0.0; use a")


FAULTS = """
import ctypes, resource, sys, threading
from trjax.memory import keep_freed

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def use():
    buffer = libc.malloc(64 << 20)
    libc.memset(buffer, 1, 64 << 20)
    libc.free(buffer)

def count():
    use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

if "keep" in sys.argv:
    keep_freed()
worker = threading.Thread(target=count)
worker.start()
worker.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_what_is_freed_is_kept() -> None:
    """A buffer of 64 MiB, used again by a thread, takes no new pages; by itself glibc gives it back."""
    back, kept = (
        int(subprocess.run([sys.executable, "-c", FAULTS, *how], capture_output=True, text=True, check=True).stdout)
        for how in ([], ["keep"])
    )
    assert back > 30  # of huge pages
    assert kept <= 2


FIRST = """
import sys, threading
from trjax import train

train.keep_freed = lambda: print(threading.active_count())
sys.exit(train.main(["--platform", "cpu", "--workdir", "run", "--data.source", "npz", "--data.root", "nowhere"]))
"""


def test_a_run_keeps_what_is_freed_before_it_has_threads() -> None:
    run = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True)
    assert run.returncode == 2, run.stderr
    assert run.stdout == "1\n"
