"""The tree is as the documents say: named paths exist, folders and files stay small."""

import re
import subprocess
from collections import Counter
from itertools import product
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
LINES_OF_TESTS = 550
# Paths that a document names ahead of the change that brings them.
EXPECTED = frozenset(
    {
        "service/http/inference/asgi.py",
        "service/http/inference/connection/",
        "service/http/inference/connection/fast_answers.py",
        "service/http/inference/connection/head_cache.py",
        "service/http/inference/connection/limits.py",
        "service/http/inference/native.py",
        "service/http/inference/routes.py",
        "service/http/observer.py",
    }
)
TOO_LONG = frozenset(
    {
        "benchmarks/engines/__main__.py",
        "service/batching/batcher.py",
        "service/engine/kernels/float_products.py",
        "service/engine/kernels/search.py",
        "service/telemetry/metrics/registry.py",
        "tests/serving/batching/test_batcher.py",
        "tests/serving/engine/test_svd_experts.py",
        "tests/training/test_report.py",
        "trainer/report/figures.py",
    }
)
TOO_FULL = frozenset({"tests/helpers"})


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
    assert {path for path in named if not exists(path)} <= EXPECTED


def test_nothing_is_expected_that_is_there() -> None:
    assert {path for path in EXPECTED if exists(path)} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_modules_can_be_run(document: Path) -> None:
    for module in set(MODULES.findall(document.read_text())):
        path = ROOT / module.rstrip(".").replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_files_stay_short() -> None:
    def too_long(path: Path) -> bool:
        most = LINES_OF_TESTS if path.parts[0] == "tests" else LINES
        return len((ROOT / path).read_text().splitlines()) > most

    assert {str(path) for path in sources() if too_long(path)} == TOO_LONG


def test_folders_stay_small() -> None:
    modules = Counter(path.parent for path in sources() if path.suffix == ".py")
    full = {str(folder) for folder, count in modules.items() if count > MODULES_IN_A_FOLDER}
    assert full == TOO_FULL


def test_packages_only_reexport() -> None:
    """An `__init__.py` holds imports and names; `__getattr__` imports when it is asked."""
    runs = re.compile(r"^(class|for|with|try|(async )?def (?!__getattr__\b))", re.MULTILINE)
    packages = [path for path in sources() if path.name == "__init__.py"]
    assert [str(path) for path in packages if runs.search((ROOT / path).read_text())] == []
