"""Labels: names for versions of a model, such as stable and canary, in models/<name>/labels.json.

    {"stable": 2, "canary": 3}

The file is the only truth: whoever may write it moves labels, with or without the API. `default`
says which version answers when a request names none.
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
MOST_LABELS = 64  # of one model: each is a series in /metrics
MOST_BYTES = 65_536
LARGEST_VERSION = 999_999_999

Labels = Mapping[str, int]


class LabelsMalformed(DSSError):
    """labels.json is not what it must be; the labels stay as they are."""


class LabelNotFound(DSSError):
    kind = Kind.NOT_FOUND


class LabelNotMoved(DSSError):
    """The version cannot be loaded, or the file not be written; nothing has changed."""

    kind = Kind.CONFLICT


def content(folder: Path) -> bytes | None:
    """Of a model's file; None if there is none."""
    file = folder / FILE
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        return stream.read(MOST_BYTES + 1)


def parse(found: bytes | None) -> Labels:
    if found is None:
        return {}
    if len(found) > MOST_BYTES:
        raise LabelsMalformed(f"{FILE} has more than {MOST_BYTES} bytes.")
    try:
        labels = json.loads(found)
    except (ValueError, RecursionError) as error:
        raise LabelsMalformed(f"{FILE} is not JSON.") from error
    if not isinstance(labels, dict) or len(labels) > MOST_LABELS:
        raise LabelsMalformed(f"{FILE} is not an object of at most {MOST_LABELS} labels.")
    for label, version in labels.items():
        if not LABEL.fullmatch(label):
            raise LabelsMalformed(f"{FILE} has the label {label[:40]!r}, which cannot be one.")
        if type(version) is not int or not 1 <= version <= LARGEST_VERSION:
            raise LabelsMalformed(f"{FILE} gives the label {label!r} no version's number.")
    return labels


def write(folder: Path, labels: Labels) -> None:
    """In one step, so that nobody reads half of it."""
    unfinished = folder / f".{FILE}.{os.getpid()}.tmp"
    try:
        with unfinished.open("w", encoding="utf-8") as stream:
            json.dump(dict(sorted(labels.items())), stream)
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
