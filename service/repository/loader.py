"""Loads the versions of a model that are to be served, and records why others are not.

Loaded are the newest good versions, as many as are kept, and those that version aliases point at. A
bad bundle is refused, its reason is kept, and it is tried again only when its files have changed. A
version that is served keeps serving when its replacement fails.

Loading is slow and runs in a thread, one call at a time. It changes nothing that is served.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, TypeVar

from service.bundle.manifest import read_manifest
from service.errors import DSSError, FileUnreadable, NoRoom
from service.repository import folder, version_labels
from service.repository.catalog import Entry, Repository
from service.repository.folder import FileStamps, ModelFolder, Stamp
from service.repository.model import Model
from service.repository.version_labels import Aliases, LabelsMalformed
from service.telemetry.metrics.registry import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T")
OpenModel = Callable[[str, int, Path], Model]
LONGEST_REASON = 500  # characters
FILE_PROBLEM = version_labels.FILE  # stands for all aliases in Entry.alias_problems


@dataclass(frozen=True)
class KnownFiles:
    """The stamps of a version's files when it was last loaded or refused."""

    manifest: Stamp | None = None  # of what is loaded
    refused: FileStamps | None = None  # of what was refused


class Refusal(NamedTuple):
    reason: str
    lasting: bool  # until the files change; otherwise the next attempt may succeed


@dataclass
class Draft:
    """An Entry while its versions are being loaded."""

    before: Entry
    found: ModelFolder
    versions: dict[int, Model] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)

    def path(self, version: int) -> Path:
        return self.found.path / str(version)


class Loader:
    def __init__(
        self, open_model: OpenModel, repository: Repository, metrics: Metrics, keep_versions: int
    ) -> None:
        self._open = open_model
        self._repository = repository
        self._metrics = metrics
        self._keep_versions = keep_versions  # 0: all
        self._known_files: dict[tuple[str, int], KnownFiles] = {}
        self._folders: dict[str, ModelFolder] = {}

    @property
    def folders(self) -> Mapping[str, ModelFolder]:
        """The models' folders as they were when each model was last loaded."""
        return self._folders

    def changed(
        self,
        found: Mapping[str, ModelFolder],
        entries: Mapping[str, Entry],
        unloaded: Collection[str],
    ) -> list[str]:
        """The models of which something may have to be loaded or unloaded."""
        return [
            name
            for name in sorted({*found, *entries})
            if self._folders.get(name) != found.get(name)
            or name not in entries
            or entries[name].unloaded != (name in unloaded)
            or self._refused_files_changed(entries[name], found.get(name))
        ]

    def forget_folder(self, name: str) -> None:
        """The entry that was loaded last is not served, so the model has to be loaded again."""
        self._folders.pop(name, None)

    def forget_refusals(self, name: str) -> None:
        for key, known in self._known_files.items():
            if key[0] == name:
                self._known_files[key] = replace(known, refused=None)

    def load_entry(
        self,
        name: str,
        found: ModelFolder | None,
        before: Entry | None,
        *,
        unloaded: bool = False,
        aliases: Aliases | None = None,
    ) -> Entry | None:
        """What is to be served of a model, loaded; None if nothing is left of it.

        `aliases` are used in place of those in the model's labels.json.
        """
        before = before or Entry(name)
        if unloaded:
            entry = Entry(name, idle=tuple(found.versions) if found else (), unloaded=True)
        elif found is None:
            entry = _without_folder(before)
        else:
            wanted, problems = _aliases(found, before) if aliases is None else (aliases, {})
            entry = self._load_found(Draft(before, found), wanted, problems)
        self._remember(name, found, entry)
        return entry if found is not None or entry.versions else None

    def _load_found(self, draft: Draft, wanted: Aliases, problems: Mapping[str, str]) -> Entry:
        found, before = draft.found, draft.before
        self._load_newest(draft)
        aliases, problems = self._resolve_aliases(draft, wanted, problems)
        if not draft.versions.keys() & found.versions.keys():
            # No version in the folder is good: those that were served keep serving.
            draft.versions.update(before.versions)
            aliases = {**before.aliases, **aliases}
        gone = frozenset(draft.versions.keys() - found.versions.keys())
        for version in sorted(gone - before.gone):
            logger.warning("The folder of %s/%d is gone; it keeps serving.", before.name, version)
        self._keep_refusals(draft)
        return Entry(
            before.name,
            versions=_newest_first(draft.versions),
            refused=_newest_first(draft.refused),
            idle=tuple(
                version
                for version in found.versions
                if version not in draft.versions and version not in draft.refused
            ),
            gone=gone,
            aliases=aliases,
            alias_problems=problems,
        )

    def _load_newest(self, draft: Draft) -> None:
        """Load versions, the newest first, until enough of them are good."""
        good = 0
        for version in draft.found.versions:
            if good == self._keep_versions > 0:
                break
            good += self._can_serve(draft, version)

    def _resolve_aliases(
        self, draft: Draft, wanted: Aliases, problems: Mapping[str, str]
    ) -> tuple[dict[str, int], dict[str, str]]:
        """An alias whose new version cannot be served stays at its old one."""
        before, aliases, alias_problems = draft.before, {}, dict(problems)
        for alias, version in sorted(wanted.items()):
            if self._can_serve(draft, version):
                aliases[alias] = version
                continue
            reason = draft.refused.get(version, "There is no such version.")
            alias_problems[alias] = f"Version {version} is not loaded: {reason}"
            if alias_problems[alias] != before.alias_problems.get(alias):
                logger.error("Label %s of %s: %s", alias, before.name, alias_problems[alias])
            old = before.aliases.get(alias)
            if old is not None and self._can_serve(draft, old):
                aliases[alias] = old
        return aliases, alias_problems

    def _keep_refusals(self, draft: Draft) -> None:
        """Keep the reasons of refused versions that were not tried this time."""
        for version, reason in draft.before.refused.items():
            if (
                version in draft.found.versions
                and version not in draft.versions
                and version not in draft.refused
                and self._is_refused(draft.before.name, version, draft.path(version))
            ):
                draft.refused[version] = reason

    # --- one version --------------------------------------------------------------------------

    def _can_serve(self, draft: Draft, version: int) -> bool:
        """Whether a version can be served; loads it if it must be."""
        if version in draft.versions:
            return True
        if version in draft.refused:
            return False
        model, reason = draft.before.versions.get(version), None
        if version in draft.found.versions:
            model, reason = self._load_version(draft, version, model)
        if reason is not None:
            draft.refused[version] = reason
        if model is not None:
            draft.versions[version] = model
        return model is not None

    def _load_version(
        self, draft: Draft, version: int, loaded: Model | None
    ) -> tuple[Model | None, str | None]:
        """The model that serves a version, and why its files, as they are now, are refused."""
        name, path, refusal = draft.before.name, draft.path(version), draft.before.refused
        known = self._files(name, version)
        stamp = folder.manifest_stamp(path)
        if loaded is not None and (stamp == known.manifest or _has_same_manifest(path, loaded)):
            self._known_files[name, version] = KnownFiles(stamp)
            return loaded, None
        stamps = folder.file_stamps(path)  # before they are read: later changes will be noticed
        if version in refusal and stamps == known.refused:
            return loaded, refusal[version]
        opened = self._open_or_refuse(name, version, path, refusal.get(version))
        if isinstance(opened, Model):
            self._known_files[name, version] = KnownFiles(stamp)
            return opened, None
        refused = stamps if opened.lasting else None
        self._known_files[name, version] = KnownFiles(known.manifest, refused)
        return loaded, opened.reason

    def _open_or_refuse(
        self, name: str, version: int, path: Path, before: str | None
    ) -> "Model | Refusal":
        self._repository.loading |= {(name, version)}
        started = perf_counter()
        try:
            model = self._open(name, version, path)
        except Exception as error:
            self._metrics.versions.load_ended(name, "refused")
            refusal = _refusal(error)
            if isinstance(error, NoRoom) and before and _needs(before) == _needs(refusal.reason):
                refusal = Refusal(before, lasting=False)  # only what is left has changed
            if refusal.reason != before:
                trace = None if isinstance(error, DSSError) else error
                logger.error("Refused %s/%d: %s", name, version, refusal.reason, exc_info=trace)
            return refusal
        seconds = perf_counter() - started
        self._metrics.versions.load_ended(name, "loaded")
        self._metrics.versions.show_seconds(name, version, seconds)
        logger.info("Loaded %s/%d in %.3f s.", name, version, seconds)
        return model

    # --- the files that were seen -------------------------------------------------------------

    def _remember(self, name: str, found: ModelFolder | None, entry: Entry) -> None:
        if found is None:
            self._folders.pop(name, None)
        else:
            self._folders[name] = found
        in_use = {*entry.versions, *entry.refused}
        for key in [key for key in self._known_files if key[0] == name and key[1] not in in_use]:
            del self._known_files[key]

    def _refused_files_changed(self, entry: Entry, found: ModelFolder | None) -> bool:
        return found is not None and any(
            not self._is_refused(entry.name, version, found.path / str(version))
            for version in entry.refused
            if version in found.versions
        )

    def _is_refused(self, name: str, version: int, path: Path) -> bool:
        """Whether the files are those that were refused."""
        return folder.file_stamps(path) == self._files(name, version).refused

    def _files(self, name: str, version: int) -> KnownFiles:
        return self._known_files.get((name, version), KnownFiles())


def _without_folder(before: Entry) -> Entry:
    gone = frozenset(before.versions)
    if gone != before.gone:
        logger.warning(
            "The folder of model %s is gone; its loaded versions keep serving.", before.name
        )
    return replace(before, gone=gone, idle=(), refused={})


def _aliases(found: ModelFolder, before: Entry) -> tuple[Aliases, Mapping[str, str]]:
    """The aliases of labels.json; if it is malformed, those of before and the reason."""
    try:
        return version_labels.parse(found.aliases), {}
    except LabelsMalformed as error:
        if FILE_PROBLEM not in before.alias_problems:
            logger.error("The labels of %s stay as they are: %s", before.name, error)
        return before.aliases, {FILE_PROBLEM: str(error)}


def _refusal(error: Exception) -> Refusal:
    if isinstance(error, DSSError):
        passing = isinstance(error, FileUnreadable | NoRoom)
        return Refusal(_bounded(str(error)), lasting=not passing)
    if isinstance(error, OSError) and error.strerror:
        return Refusal(f"The bundle cannot be read: {error.strerror}.", lasting=False)
    if isinstance(error, MemoryError):
        return Refusal("There is not enough memory for the bundle.", lasting=False)
    return Refusal("The bundle could not be opened; the server's log says why.", lasting=True)


def _bounded(reason: str) -> str:
    """Of a length that does not depend on what the bundle holds."""
    if len(reason) <= LONGEST_REASON:
        return reason
    return f"{reason[: LONGEST_REASON - 1]}…"


def _needs(no_room: str) -> str:
    """What loading needs, without what is left, which changes all the time."""
    return no_room.partition(",")[0]


def _has_same_manifest(path: Path, loaded: Model) -> bool:
    """Whether a manifest with a new stamp has the old content: touched, or mounted again."""
    try:
        return read_manifest(path).checksum == loaded.manifest.checksum
    except (DSSError, OSError):
        return False


def _newest_first(by_version: Mapping[int, T]) -> dict[int, T]:
    return dict(sorted(by_version.items(), reverse=True))
