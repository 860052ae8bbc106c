"""Writes the bill of materials of a serving install: `make sbom`, after `make requirements`.

Installs what service.txt names, by its hashes, into an environment of its own, and lists what is
there with versions, licences and who needs whom, as CycloneDX JSON. The same input gives the same
file, so that a test can compare it.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from deploy.requirements.__main__ import FOLDER, ROOT

SBOM = FOLDER / "sbom.cdx.json"


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        environment = Path(scratch) / "venv"
        python = environment / "bin" / "python"
        _run(sys.executable, "-m", "venv", "--without-pip", environment)
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
        _run(*pip, "--require-hashes", "--no-compile", "-r", FOLDER / "service.txt")
        listed = (Path(sys.executable).with_name("cyclonedx-py"), "environment", python)
        _run(*listed, "--pyproject", ROOT / "pyproject.toml", *_options(), "--output-file", SBOM)
    listed_parts = json.loads(SBOM.read_text())
    _remove_links(listed_parts)
    SBOM.write_text(json.dumps(listed_parts, indent=2) + "\n")


def _remove_links(part: Any) -> None:  # noqa: ANN401
    """To web sites of packages: they change without the package, and purl says which it is."""
    if isinstance(part, dict):
        part.pop("externalReferences", None)
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            _remove_links(inner)


def _options() -> tuple[str, ...]:
    return ("--mc-type", "application", "--output-reproducible", "--output-format", "JSON")


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)  # noqa: S603


if __name__ == "__main__":
    main()
