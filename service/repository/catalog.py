"""Which models and versions are served: one immutable Catalog, replaced in one step on the event
loop's thread, so that a request sees all of a change or nothing of it.

`loader.py` loads versions, `manager.py` decides when and switches the catalog.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from service.errors import DSSError, Kind
from service.repository.folder import VERSION
from service.repository.model import Model
from service.repository.version_labels import DEFAULT


class ModelNotFound(DSSError):
    kind = Kind.NOT_FOUND


class VersionNotFound(DSSError):
    kind = Kind.NOT_FOUND


class Loading(DSSError):
    """The models are still being loaded."""

    kind = Kind.UNAVAILABLE


@dataclass(frozen=True)
class Entry:
    """One model: its served versions, and why others are not served. Versions are newest first."""

    name: str
    versions: Mapping[int, Model] = field(default_factory=dict)
    # version -> reason; one that is also in `versions` serves what it did before its bundle changed
    refused: Mapping[int, str] = field(default_factory=dict)
    idle: tuple[int, ...] = ()  # in the folder, not loaded
    gone: frozenset[int] = frozenset()  # loaded, but no longer in the folder
    aliases: Mapping[str, int] = field(default_factory=dict)  # alias -> loaded version
    alias_problems: Mapping[str, str] = field(default_factory=dict)  # why an alias is not moved
    unloaded: bool = False  # by a request

    @property
    def chosen(self) -> Model | None:
        """What answers if no version is named: the newest, unless there is the alias `default`."""
        pinned = self.aliases.get(DEFAULT)
        if pinned is not None:
            return self.versions[pinned]
        return next(iter(self.versions.values()), None)


@dataclass(frozen=True)
class Catalog:
    entries: Mapping[str, Entry] = field(default_factory=dict)

    def models(self) -> Iterator[Model]:
        for entry in self.entries.values():
            yield from entry.versions.values()


class Repository:
    def __init__(self, default_model: str | None = None) -> None:
        self._default_model = default_model
        self._catalog: Catalog | None = None
        # The versions that were tried since the last switch: what becomes of them is not shown yet.
        self.loading: frozenset[tuple[str, int]] = frozenset()
        self.on_switch: list[Callable[[], None]] = []  # called after every switch

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

    def entry(self, name: str) -> Entry:
        entry = self.catalog.entries.get(name)
        if entry is None:
            raise ModelNotFound(f"There is no model {name[:64]!r}.")
        return entry

    def get(self, name: str | None = None, version: str | None = None) -> Model:
        """The model that a path of the API names, or the default; a version may be an alias."""
        entry = self.entry(self.default_name if name is None else name)
        if version is None or version == DEFAULT:
            if entry.chosen is None:
                raise ModelNotFound(f"No version of model {entry.name!r} {_why_none(entry)}.")
            return entry.chosen
        if version in entry.aliases:
            return entry.versions[entry.aliases[version]]
        number = int(version) if VERSION.fullmatch(version) else 0
        if number in entry.versions:
            return entry.versions[number]
        raise VersionNotFound(_why_not(entry, version, number))

    def listed(self, entry: Entry) -> list[int]:
        """All known versions, also those that are being loaded, newest first."""
        versions = {*entry.versions, *entry.refused, *entry.idle}
        versions |= {version for name, version in self.loading if name == entry.name}
        return sorted(versions, reverse=True)

    def forget_tried(self, *names: str) -> None:
        """What became of these models' versions is shown now."""
        self.loading = frozenset(tried for tried in self.loading if tried[0] not in names)

    def switch(self, entries: Mapping[str, Entry | None]) -> list[Model]:
        """Serve these entries, and stop serving those that are None. Returns the models that no
        longer serve."""
        before = self._catalog or Catalog()
        changed = {**before.entries, **entries}
        kept = {name: entry for name, entry in sorted(changed.items()) if entry is not None}
        self._catalog = Catalog(kept)
        self.forget_tried(*entries)
        serving = {id(model) for model in self._catalog.models()}
        for notify in self.on_switch:
            notify()
        return [model for model in before.models() if id(model) not in serving]


def _why_none(entry: Entry) -> str:
    return "is loaded; it was unloaded" if entry.unloaded else "could be loaded"


def _why_not(entry: Entry, version: str, number: int) -> str:
    if number in entry.refused:
        return f"Version {number} of model {entry.name!r} was refused."
    if number in entry.idle:
        return f"Version {number} of model {entry.name!r} is not loaded."
    if version in entry.alias_problems:
        return f"The label {version!r} of model {entry.name!r} points at no loaded version."
    return f"Model {entry.name!r} has no version {version[:16]!r}."
