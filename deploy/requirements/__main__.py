"""Writes the hashes of what is installed to serve: `make requirements`, after constraints.txt.

service.txt has every package of a serving install, build.txt what builds this project's own wheel.
The versions are those of constraints.txt; the hashes are of all files that the index has of them,
for every platform, so pip accepts no other file anywhere.
"""

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
CONSTRAINTS = ROOT / "constraints.txt"
HEAD = (
    "# Made by `make requirements` from pyproject.toml and constraints.txt: change those instead.\n"
)
OPTIONS = ("--universal", "--python-version", "3.11", "--generate-hashes", "--no-annotate")


def wanted() -> dict[str, list[str]]:
    """By the name of the file, what pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = [*project["build-system"]["requires"], "editables"]  # which an editable install needs
    return {"service.txt": project["project"]["dependencies"], "build.txt": build}


def compiled(requirements: list[str]) -> str:
    uv = Path(sys.executable).with_name("uv")
    with tempfile.TemporaryDirectory() as scratch:
        asked = Path(scratch) / "requirements.in"
        asked.write_text("\n".join(requirements))
        command = [uv, "pip", "compile", asked, "--constraint", CONSTRAINTS, *OPTIONS]
        command += ["--no-header", "--quiet", "--native-tls"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
    return HEAD + done.stdout


def main() -> None:
    for name, requirements in wanted().items():
        (FOLDER / name).write_text(compiled(requirements))


if __name__ == "__main__":
    main()
