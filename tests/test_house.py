"""The house keeps its own rules: floors, who prints, what an import touches, lint, types."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trjax"
FLOORS = [
    ["sections", "moments"],
    [
        "config",
        "buckets",
        "mesh",
        "memory",
        "keys",
        "batchnorm",
        "convolution",
        "pooling",
        "chain",
        "records",
        "targets",
        "hlo",
        "algorithms",
        "replicas",
        "processes",
        "interrupts",
        "watchdog",
        "commands",
    ],
    ["tables", "launch", "plan", "data", "resnet", "collectives", "optim", "state", "cost", "options", "operations"],
    [
        "presets",
        "workdir",
        "sizes",
        "packing",
        "reducers",
        "checkpoint",
        "grouping",
        "timeline",
        "compiled",
        "profiling",
    ],
    ["backward", "zero", "planning", "buffers"],
    ["step", "forms", "audit", "figures"],
    ["program", "explain_cost", "interchange"],
    ["compilation", "saved"],
    ["evaluation", "progress"],
    ["loop", "explain_step"],
    ["replay", "start"],
    ["train", "explain", "predict", "export", "report", "preview"],
]
FLOOR = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent.name == "data" or path.name != "__init__.py")


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("trjax.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_lower_floors(path: Path) -> None:
    own = module_of(path)
    others = imported(ast.parse(path.read_text())) - ({"data"} if own == "data" else set())
    assert {name for name in others if FLOOR[name] >= FLOOR[own]} == set()


def calls(path: Path, name: str) -> bool:
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name for node in nodes
    )


def test_only_the_top_floor_and_the_records_print() -> None:
    assert {module_of(path) for path in FILES if calls(path, "print")} <= {
        "train",
        "explain",
        "explain_step",
        "launch",
        "commands",
        "records",
        "data",
    }


def test_only_collectives_talks_to_other_devices() -> None:
    words = ("psum", "pmean", "psum_scatter", "all_gather", "ppermute", "axis_index", "pcast")
    talking = {
        module_of(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in words and ast.unparse(node.value) in ("lax", "jax.lax")
    }
    assert talking == {"collectives"}


def test_importing_touches_no_device() -> None:
    modules = [f"trjax.{module}" for module in FLOOR]
    code = (
        f"import importlib; [importlib.import_module(name) for name in {modules}];"
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_and_functions_stay_short() -> None:
    for path in [*FILES, *sorted((ROOT / "experiments").glob("*.py"))]:
        text = path.read_text()
        assert len(text.splitlines()) <= 300, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                start = node.body[0].end_lineno if ast.get_docstring(node) else node.lineno
                assert (node.end_lineno or 0) - (start or 0) <= 45, f"{path}: {node.name}"


def test_readme_names_the_two_commands_and_every_preset() -> None:
    from trjax.presets import PRESETS

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
