"""Which models and versions are loaded: models/<name>/<version>/, a version being 1, 2, 3, ...

All good versions answer by their number; without one the newest good version does. A bad bundle
is refused and its reason kept. What is loaded is one immutable Catalog, replaced in one step.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from service.bundle import MANIFEST
from service.errors import DSSError, ModelsFolderMissing
from service.model import Model

logger = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
VERSION = re.compile(r"[1-9][0-9]{0,8}")


class ModelNotFound(DSSError):
    pass


class VersionNotFound(DSSError):
    pass


class Loading(DSSError):
    """The models are still being loaded."""


@dataclass(frozen=True)
class Entry:
    """One name: its good versions and the reasons of the refused ones, newest first."""

    name: str
    versions: Mapping[int, Model]
    refused: Mapping[int, str]

    @property
    def newest(self) -> Model | None:
        return next(iter(self.versions.values()), None)


@dataclass(frozen=True)
class Catalog:
    entries: Mapping[str, Entry] = field(default_factory=dict)

    def models(self) -> Iterator[Model]:
        for entry in self.entries.values():
            yield from entry.versions.values()


class Repository:
    def __init__(
        self,
        folder: Path,
        open_model: Callable[[str, int, Path], Model],
        default_model: str | None = None,
    ) -> None:
        self._folder = folder
        self._open = open_model
        self._default_model = default_model
        self._catalog: Catalog | None = None

    @property
    def loaded(self) -> bool:
        return self._catalog is not None

    @property
    def catalog(self) -> Catalog:
        if self._catalog is None:
            raise Loading("The models are still being loaded.")
        return self._catalog

    @property
    def default_name(self) -> str:
        """The configured model, or else the first by name that has a good version."""
        if self._default_model is not None:
            return self._default_model
        for entry in self.catalog.entries.values():
            if entry.versions:
                return entry.name
        raise ModelNotFound("No model is loaded.")

    def load(self) -> None:
        """Read every bundle. Slow, so call it from a thread; nothing is served before the end."""
        entries = {}
        for name, paths in scan(self._folder).items():
            versions: dict[int, Model] = {}
            refused: dict[int, str] = {}
            for version, path in paths.items():
                opened = self._open_or_reason(name, version, path)
                if isinstance(opened, Model):
                    versions[version] = opened
                else:
                    refused[version] = opened
            entries[name] = Entry(name, versions, refused)
        self._catalog = Catalog(entries)

    def entry(self, name: str) -> Entry:
        entry = self.catalog.entries.get(name)
        if entry is None:
            raise ModelNotFound(f"There is no model {name[:64]!r}.")
        return entry

    def get(self, name: str | None = None, version: str | None = None) -> Model:
        """The model for a path of the API: no name is the default, no version the newest good."""
        entry = self.entry(self.default_name if name is None else name)
        if version is None:
            if entry.newest is None:
                raise ModelNotFound(f"No version of model {entry.name!r} could be loaded.")
            return entry.newest
        number = int(version) if VERSION.fullmatch(version) else 0
        if number in entry.versions:
            return entry.versions[number]
        if number in entry.refused:
            raise VersionNotFound(f"Version {number} of model {entry.name!r} was refused.")
        raise VersionNotFound(f"Model {entry.name!r} has no version {version[:16]!r}.")

    async def close(self) -> None:
        for model in self._catalog.models() if self._catalog else ():
            await model.batcher.close()

    def _open_or_reason(self, name: str, version: int, path: Path) -> Model | str:
        try:
            model = self._open(name, version, path)
        except DSSError as error:
            logger.error("Refused %s/%d: %s", name, version, error)
            return str(error)
        except Exception:
            logger.exception("Refused %s/%d: it could not be opened.", name, version)
            return "The bundle could not be opened; the server's log says why."
        logger.info("Loaded %s/%d.", name, version)
        return model


def scan(folder: Path) -> dict[str, dict[int, Path]]:
    """The bundles of a models folder, names in order, the newest version first.

    A folder without a manifest is half-written or something else: not a model.
    """
    if not folder.is_dir():
        raise ModelsFolderMissing(f"There is no models folder {folder}.")
    found: dict[str, dict[int, Path]] = {}
    for model in sorted(folder.iterdir()):
        if not NAME.fullmatch(model.name) or not model.is_dir():
            continue
        versions = {
            int(path.name): path
            for path in model.iterdir()
            if VERSION.fullmatch(path.name) and (path / MANIFEST).is_file()
        }
        if versions:
            found[model.name] = dict(sorted(versions.items(), reverse=True))
    return found
