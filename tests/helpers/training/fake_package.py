"""An installed package that has files and no code that could be imported."""

from pathlib import Path

import pytest


def install(
    monkeypatch: pytest.MonkeyPatch, site: Path, name: str, files: dict[str, bytes]
) -> None:
    """On the path for this test, with these files by their paths in the package's folder."""
    facts = site / f"{name.replace('-', '_')}-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    for path, content in files.items():
        place = site / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    listed = "".join(f"{path},,\n" for path in files)
    (facts / "RECORD").write_text(listed)
    monkeypatch.syspath_prepend(site)
