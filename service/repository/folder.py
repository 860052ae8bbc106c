"""What lies in a models folder: models/<name>/<version>/, a version being 1, 2, 3, ...

Only names, sizes and times are read here, again and again, so it must be cheap. A folder without a
manifest is half-written or something else: not a bundle.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from service.bundle.format import MANIFEST
from service.errors import ModelsFolderMissing
from service.repository import version_labels as labels

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
VERSION = re.compile(r"[1-9][0-9]{0,8}")
MOST_FILES = 10_000  # of a bundle that was refused, whose files are looked at

Stamp = tuple[int, int, int]  # when it was changed, its size, and which file it is
Look = tuple[tuple[str, Stamp], ...]


@dataclass(frozen=True)
class ModelFolder:
    """One model's folder."""

    path: Path
    versions: Mapping[int, Stamp]  # of the manifest, the newest version first
    labels: bytes | None


def scan(folder: Path, before: Mapping[str, ModelFolder] | None = None) -> dict[str, ModelFolder]:
    """The models of a folder, names in order; `before` for those that cannot be read now."""
    found: dict[str, ModelFolder] = {}
    try:
        models = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelsFolderMissing(f"There is no models folder {folder}.") from error
    except OSError as error:
        raise ModelsFolderMissing(
            f"The models folder {folder} cannot be read: {error.strerror}."
        ) from error
    for model in models:
        if not NAME.fullmatch(model.name) or not model.is_dir():
            continue
        try:
            versions = dict(sorted(_versions(model), reverse=True))
            if versions:
                found[model.name] = ModelFolder(model, versions, labels.content(model))
        except FileNotFoundError:  # it was just removed
            continue
        except OSError:
            if before and model.name in before:
                found[model.name] = before[model.name]
    return found


def _versions(model: Path) -> Iterator[tuple[int, Stamp]]:
    for path in model.iterdir():
        if VERSION.fullmatch(path.name):
            stamp = manifest_stamp(path)
            if stamp is not None:
                yield int(path.name), stamp


def manifest_stamp(path: Path) -> Stamp | None:
    try:
        return _stamp(path / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return None


def file_stamps(path: Path) -> Look:
    """All files of a bundle as they are now: a copy that is completed or mended looks different."""
    return tuple(sorted(islice(_files(path), MOST_FILES)))


def _files(path: Path) -> Iterator[tuple[str, Stamp]]:
    for folder, _, names in os.walk(path):
        for name in names:
            file = Path(folder, name)
            try:
                yield str(file), _stamp(file)
            except OSError:
                continue


def _stamp(file: Path) -> Stamp:
    found = file.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino
