import shutil
from pathlib import Path

import pytest

from service import bundle


@pytest.fixture
def folder(tiny: bundle.Bundle, tmp_path: Path) -> Path:
    """A copy of the tiny bundle to damage."""
    return Path(shutil.copytree(tiny.path, tmp_path / "copy"))
