"""The tree is as the documents say: named paths exist, folders and files stay small."""

import re
import subprocess
import tomllib
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import pytest
from helpers.paths import ROOT

DOCUMENTS = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "models/FORMAT.md")),
    ]
)
TOPS = ("benchmarks", "deploy", "docs", "examples", "service", "tests", "trainer")
NAMED = re.compile(rf"`((?:{'|'.join(TOPS)})/[^\s`]*)`")
MODULES = re.compile(r"python -m ((?:benchmarks|service|deploy)[\w.]*)")

MODULES_IN_A_FOLDER = 22
LINES = 420


def sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.js", "*.css"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = listed.stdout.splitlines()
    return [Path(name) for name in names if (ROOT / name).is_file()]


def each_of(name: str) -> list[str]:
    """`a/{b,c}.py` are two paths."""
    parts = re.split(r"\{([^}]*)\}", name)
    choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def exists(name: str) -> bool:
    if "<" in name or "..." in name:
        return True  # a pattern for readers
    if "*" in name:
        return any(ROOT.glob(name))
    return (ROOT / name).exists()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_paths_exist(document: Path) -> None:
    named = {path for name in NAMED.findall(document.read_text()) for path in each_of(name)}
    assert {path for path in named if not exists(path)} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_modules_can_be_run(document: Path) -> None:
    for module in set(MODULES.findall(document.read_text())):
        path = ROOT / module.rstrip(".").replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_files_stay_short() -> None:
    def too_long(path: Path) -> bool:
        return len((ROOT / path).read_text().splitlines()) > LINES

    assert {str(path) for path in sources() if too_long(path)} == set()


def test_folders_stay_small() -> None:
    modules = Counter(path.parent for path in sources() if path.suffix == ".py")
    full = {str(folder) for folder, count in modules.items() if count > MODULES_IN_A_FOLDER}
    assert full == set()


def test_packages_only_reexport() -> None:
    """An `__init__.py` holds imports and names; `__getattr__` imports when it is asked."""
    runs = re.compile(r"^(class|for|with|try|(async )?def (?!__getattr__\b))", re.MULTILINE)
    packages = [path for path in sources() if path.name == "__init__.py"]
    assert [str(path) for path in packages if runs.search((ROOT / path).read_text())] == []


@pytest.mark.parametrize("container", ["service", "service.http", "trainer"])
def test_the_architecture_page_has_the_layers_in_order(container: str) -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (
        contract["layers"]
        for contract in linter["contracts"]
        if contract["type"] == "layers" and contract["containers"] == [container]
    )
    page = (ROOT / "docs" / "architecture.md").read_text()
    folder = container.replace(".", "/")
    places = [[page.index(f"`{folder}/{name}") for name in layer.split(" | ")] for layer in layers]
    assert all(max(upper) < min(lower) for upper, lower in pairwise(places))
