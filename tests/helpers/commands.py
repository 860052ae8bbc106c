"""Tools that are run as commands."""

import subprocess
import sys
from pathlib import Path

from helpers.paths import ROOT

TOOLS = Path(sys.executable).parent  # those that pip installs


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """A command that must succeed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
