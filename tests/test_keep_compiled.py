"""Compiled programs that the next start need not compile."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers import one_block_chain, tiny_config
from jax import monitoring
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from trjax.run.fit import fit
from trjax.xla.cache import keep_compiled


@pytest.fixture
def no_cache_of_its_own() -> Iterator[None]:
    """As JAX is where nobody has told it of a cache."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def train_anew(workdir: str, **changes: Any) -> tuple[Any, list[str]]:
    """Trains as in a process of its own; returns the summary, and a line for every program that it found.

    The chain is a small one that still takes longer to compile than what is too little to be kept.
    """
    jax.clear_caches()
    cached: list[str] = []
    monitoring.register_event_listener(lambda event, **_: cached.append(event))
    try:
        summary = fit(tiny_config(epochs=1, workdir=workdir, **changes), one_block_chain())
    finally:
        monitoring.clear_event_listeners()
    return summary, [name for name in cached if name.endswith("/cache_hits")]


@pytest.mark.usefixtures("no_cache_of_its_own")
def test_compiled_programs_are_kept_beside_runs() -> None:
    first, hits = train_anew("runs/one")
    kept = sorted(Path("runs/.trjax-cache").iterdir())
    assert any("update" in path.name for path in kept)
    assert hits == []
    second, hits = train_anew("runs/two")
    assert len(hits) >= len(kept)
    assert set(kept) <= set(Path("runs/.trjax-cache").iterdir())
    assert (second.step, second.best) == (first.step, first.best)
    for path in kept:  # a process that was killed while it wrote
        path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache"):
        third, _ = train_anew("runs/three")
    assert third.best == first.best
    assert jax.config.values["jax_compilation_cache_dir"] is None  # as it was
    train_anew("off/run", keep_compiled=False)
    assert [path.name for path in Path("off").iterdir()] == ["run"]


@pytest.mark.usefixtures("no_cache_of_its_own")
def test_where_programs_cannot_be_kept_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    Path("full").mkdir()
    Path("full/.trjax-cache").write_text("a file, where a folder is to be")
    summary, _ = train_anew("full/run")
    assert summary.finished
    assert "compiled programs are not kept" in capsys.readouterr().out


def test_a_cache_that_jax_has_is_left_alone() -> None:
    given = jax.config.values["jax_compilation_cache_dir"]
    assert given  # by conftest
    with keep_compiled(Path("runs")):
        assert jax.config.values["jax_compilation_cache_dir"] == given
    assert not Path("runs").exists()


@pytest.mark.usefixtures("no_cache_of_its_own")
def test_what_somebody_else_has_made_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("runs/.trjax-cache").mkdir(parents=True)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="is not this user's"), keep_compiled(Path("runs")):
        pass
