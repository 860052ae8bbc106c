"""Bundles changed after they were written, with the manifest made to fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service.bundle.format import MANIFEST
from service.bundle.manifest import NO_CHECKSUM, sha256

Change = Callable[[dict[str, Any]], None]


def rewrite_manifest(folder: Path, change: Change) -> None:
    """Changes the manifest and states its checksum anew."""
    fields = json.loads((folder / MANIFEST).read_text())
    change(fields)
    fields["checksum"] = NO_CHECKSUM
    content = json.dumps(fields, indent=2)
    checksum = sha256(content.encode())
    (folder / MANIFEST).write_text(content.replace(NO_CHECKSUM, checksum))


def replace_file(folder: Path, name: str, content: bytes) -> None:
    """Changes a file and its entry in the manifest."""
    (folder / name).write_bytes(content)

    def change(fields: dict[str, Any]) -> None:
        fields["files"][name] = {"sha256": sha256(content), "bytes": len(content)}

    rewrite_manifest(folder, change)


def set_field(name: str, value: object) -> Change:
    def change(fields: dict[str, Any]) -> None:
        fields[name] = value

    return change
