"""The map of the code is true, and rooms import only rooms below them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(path.relative_to(ROOT / "qbench") for path in (ROOT / "qbench").rglob("*.py"))
FLOORS = {
    "errors": 0,
    "registry": 0,
    "lazy": 0,
    "resources": 0,
    "progress": 0,
    "result": 0,
    "formats": 1,
    "kernels": 2,
    "models": 2,
    "calibration": 3,
    "solvers": 3,
    "transforms": 3,
    "scheme": 4,
    "compress": 4,
    "export": 4,
    "peers": 4,
    "runtime": 4,
    "evaluate": 5,
    "benchmark": 5,
}
TOP = 6


def floor(module: str) -> int:
    return FLOORS.get(module.split(".")[0], TOP)


def test_the_map_names_exactly_the_modules_there_are() -> None:
    named = re.findall(r"^\| `([\w/]+\.py)` \|", (ROOT / "docs" / "structures.md").read_text(), re.MULTILINE)
    assert sorted(named) == [str(path) for path in MODULES if path.name != "__init__.py"]


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_rooms_import_only_rooms_below(path: Path) -> None:
    own = floor(path.parts[0].removesuffix(".py"))
    tree = ast.parse((ROOT / "qbench" / path).read_text())
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    for module in imported:
        if module.startswith("qbench."):
            assert floor(module.removeprefix("qbench.")) <= own, f"{path} imports {module}"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_files_stay_short(path: Path) -> None:
    assert len((ROOT / "qbench" / path).read_text().splitlines()) <= 400
