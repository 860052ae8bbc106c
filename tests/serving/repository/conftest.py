from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.model_manager import Kept


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def kept(folder: Path) -> Iterator[Callable[..., Kept]]:
    """Makes them, and closes them at the end."""
    made: list[Kept] = []

    def make(default_model: str | None = None, keep_versions: int = 2) -> Kept:
        made.append(Kept(folder, default_model, keep_versions=keep_versions))
        return made[-1]

    yield make
    for one in made:
        one.close()
