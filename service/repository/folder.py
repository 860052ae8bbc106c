"""Scans a models folder: models/<name>/<version>/, a version being 1, 2, 3, ...

A scan reads only names, sizes and times, because it is repeated every few seconds. A folder without
a manifest is still being written, or something else, and is no bundle.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from service.bundle.format import MANIFEST
from service.errors import ModelsFolderMissing
from service.repository import version_labels

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
VERSION = re.compile(r"[1-9][0-9]{0,8}")
MOST_FILES = 10_000  # of a refused bundle that are checked for changes

Stamp = tuple[int, int, int]  # when a file was changed, its size, its inode
FileStamps = tuple[tuple[str, Stamp], ...]


@dataclass(frozen=True)
class ModelFolder:
    """One model's folder, as a scan found it."""

    path: Path
    versions: Mapping[int, Stamp]  # stamps of the manifests, the newest version first
    aliases: bytes | None  # the content of labels.json


def scan(folder: Path, before: Mapping[str, ModelFolder] | None = None) -> dict[str, ModelFolder]:
    """The models of a folder, by name; those that cannot be read now as they were `before`."""
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
                found[model.name] = ModelFolder(model, versions, version_labels.content(model))
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


def file_stamps(path: Path) -> FileStamps:
    """The stamps of all files of a bundle: they change when a copy is completed or repaired."""
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
