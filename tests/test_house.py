"""The house keeps its own rules: wings, who prints, what an import touches, lint, types."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trjax"
WINGS = {"audit", "config", "cost", "data", "explain", "models", "run", "step", "xla"}
FILES = sorted(PACKAGE.rglob("*.py"))
LINT_IMPORTS = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]


def test_the_folder_shows_the_architecture() -> None:
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert {path.name for path in entries if path.is_dir()} == WINGS
    assert len([path for path in entries if path.is_file()]) <= 20
    for wing in WINGS:
        sentence = ast.get_docstring(ast.parse((PACKAGE / wing / "__init__.py").read_text()))
        assert sentence is not None
        assert "It may use" in sentence, wing


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    wide = {**os.environ, "COLUMNS": "300"}  # a verdict stands on the line of its contract
    return subprocess.run(LINT_IMPORTS, cwd=folder, env=wide, capture_output=True, text=True)


def test_wings_import_as_the_contracts_say() -> None:
    run = lint_imports(ROOT)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("module", "planted", "contract"),
    [
        ("xla/hlo.py", "trjax.config.run", "The readers of programs"),
        ("audit/timeline.py", "trjax.step.plan", "Wings lie in layers"),
        ("step/plan.py", "trjax.audit.report", "In step, rules alone use audit"),
        ("config/run.py", "jax", "Config needs text only"),
        ("explain/plan.py", "trjax.run.loop", "Explaining a run needs no run"),
        ("testing.py", "trjax.step.plan", "Assertions about programs need audit only"),
        ("models/chain.py", "trjax.mesh", "Models need leaves only"),
        ("data/folders.py", "trjax.mesh", "Data needs config and leaves"),
        ("cost/kernels.py", "jax", "Predicting seconds needs no JAX"),
        ("run/loop.py", "trjax.commands", "Wings lie in layers"),
    ],
)
def test_a_wrong_import_is_caught(module: str, planted: str, contract: str, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "trjax", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "trjax" / module).open("a") as file:
        file.write(f"import {planted}\n")
    run = lint_imports(tmp_path)
    assert run.returncode == 1
    assert re.search(f"^{contract}.* BROKEN", run.stdout, re.MULTILINE), run.stdout


@pytest.mark.parametrize(
    ("module", "name", "home"),
    [
        ("trjax.batchnorm", "BatchNorm", "trjax.models.batchnorm"),
        ("trjax.collectives", "sum_moments", "trjax.step.collectives"),
        ("trjax.config", "Config", "trjax.config.run"),
        ("trjax.config", "DataConfig", "trjax.config.data"),
    ],
)
def test_old_import_paths_forward_with_one_warning(module: str, name: str, home: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{module}.{name} is now {home}.{name}") as caught:
        found = getattr(import_module(module), name)
    assert found is getattr(import_module(home), name)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(import_module(module), "nothing")  # noqa: B009


def test_an_old_path_warns_once_a_name_where_it_is_imported(tmp_path: Path) -> None:
    code = tmp_path / "user.py"
    code.write_text("from trjax.config import Config, DataConfig\nfrom trjax.train import train\n")
    run = subprocess.run([sys.executable, "-W", "always", str(code)], capture_output=True, text=True, check=True)
    warned = [line for line in run.stderr.splitlines() if "DeprecationWarning" in line]
    assert len(warned) == 2
    assert all(line.startswith(f"{code}:1: DeprecationWarning: trjax.config.") for line in warned)


def test_public_names_are_imported_when_they_are_used() -> None:
    code = (
        "import sys, trjax; assert 'jax' not in sys.modules;"
        "[getattr(trjax, name) for name in trjax.__all__]; assert 'jax' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def calls(path: Path, name: str) -> bool:
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name for node in nodes
    )


def place_of(path: Path) -> str:
    """The wing of a file, or the file itself if it lies beside the wings."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_only_doors_and_commands_print() -> None:
    printing = {place_of(path) for path in FILES if calls(path, "print")}
    assert printing <= {"__main__", "train", "explain", "launch", "commands", "data"}


def test_only_collectives_talks_to_other_devices() -> None:
    words = ("psum", "pmean", "psum_scatter", "all_gather", "ppermute", "axis_index", "pcast")
    talking = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in words and ast.unparse(node.value) in ("lax", "jax.lax")
    }
    assert talking == {"step/collectives.py"}


def test_importing_touches_no_device() -> None:
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES]
    code = (
        f"import importlib; [importlib.import_module(name) for name in {names}];"
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_and_functions_stay_short() -> None:
    for path in [*FILES, *sorted((ROOT / "experiments").glob("*.py"))]:
        text = path.read_text()
        assert len(text.splitlines()) <= 300, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if ast.get_docstring(node):
                    lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
                assert lines <= 45, f"{path}: {node.name}"


def test_the_table_of_contributing_names_what_exists() -> None:
    table = re.findall(
        r"^\| .+ \| `(trjax/\S+\.py)` \| `(\S+)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert len(table) >= 12
    for path, name in table:
        scope: ast.AST = ast.parse((ROOT / path).read_text())
        for part in name.split("."):
            defined = [node for node in ast.iter_child_nodes(scope) if getattr(node, "name", "") == part]
            assert defined, f"{path} defines no {name}"
            scope = defined[0]


def test_readme_names_the_two_commands_and_every_preset() -> None:
    from trjax.config.presets import PRESETS

    readme = (ROOT / "README.md").read_text()
    for command in (
        "python3 -m pip install -e . && python3 -m trjax.train",
        "python3 -m pip install -e '.[test]' && python3 -m pytest",
    ):
        assert command in readme
    for name in PRESETS:
        assert f"`{name}`" in readme


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for extra in project["optional-dependencies"].values() for name in extra]
    wanted = [*project["dependencies"], *extras]
    declared = {re.split(r"[\[<>=;]", name)[0] for name in wanted}
    own = {"trjax", "helpers", "", *(path.stem for path in (ROOT / "experiments").glob("*.py"))}
    names = {"sklearn": "scikit-learn", "tomli_w": "tomli-w", "PIL": "pillow", "cv2": "opencv-python-headless"}
    names |= {"array_record": "array-record"}
    for path in [*FILES, *(ROOT / "tests").glob("*.py"), *(ROOT / "experiments").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for top in {module.split(".")[0] for module in modules} - set(sys.stdlib_module_names) - own:
                assert names.get(top, top) in declared, f"{path}: {top}"


@pytest.mark.parametrize("tool", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join)
def test_lint_and_types(tool: list[str]) -> None:
    run = subprocess.run([sys.executable, "-m", *tool], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
