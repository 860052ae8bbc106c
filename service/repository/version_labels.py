"""Version aliases: names for versions of a model, such as stable and canary, in
models/<name>/labels.json. The API and the file call them labels.

    {"stable": 2, "canary": 3}

The file is the only place where they are stored: changing it, by hand or through the API, moves
them. The alias `default` says which version answers a request that names none.
"""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from service.errors import DSSError, Kind

FILE = "labels.json"
DEFAULT = "default"
LABEL = re.compile(r"[a-z][a-z0-9_-]{0,31}")
MOST_LABELS = 64  # for each model: every alias is a series in /metrics
MOST_BYTES = 65_536
LARGEST_VERSION = 999_999_999

Aliases = Mapping[str, int]  # alias -> version


class LabelsMalformed(DSSError):
    """labels.json cannot be used; the version aliases stay as they are."""


class LabelNotFound(DSSError):
    kind = Kind.NOT_FOUND


class LabelNotMoved(DSSError):
    """The version cannot be loaded, or labels.json cannot be written; nothing has changed."""

    kind = Kind.CONFLICT


def content(folder: Path) -> bytes | None:
    """The bytes of a model's labels.json; None if there is none."""
    file = folder / FILE
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        return stream.read(MOST_BYTES + 1)


def parse(content: bytes | None) -> Aliases:
    if content is None:
        return {}
    if len(content) > MOST_BYTES:
        raise LabelsMalformed(f"{FILE} has more than {MOST_BYTES} bytes.")
    try:
        aliases = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise LabelsMalformed(f"{FILE} is not JSON.") from error
    if not isinstance(aliases, dict) or len(aliases) > MOST_LABELS:
        raise LabelsMalformed(f"{FILE} is not an object of at most {MOST_LABELS} labels.")
    for alias, version in aliases.items():
        if not LABEL.fullmatch(alias):
            raise LabelsMalformed(f"{FILE} has the label {alias[:40]!r}, which cannot be one.")
        if type(version) is not int or not 1 <= version <= LARGEST_VERSION:
            raise LabelsMalformed(f"{FILE} gives the label {alias!r} no version's number.")
    return aliases


def write(folder: Path, aliases: Aliases) -> None:
    """Replace a model's labels.json in one step, so that no reader sees half of it."""
    unfinished = folder / f".{FILE}.{os.getpid()}.tmp"
    try:
        with unfinished.open("w", encoding="utf-8") as stream:
            json.dump(dict(sorted(aliases.items())), stream)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(folder / FILE)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise LabelNotMoved(
            f"{FILE} of model {folder.name!r} cannot be written: {error.strerror}."
        ) from error
