"""Which versions of a model are loaded, and what becomes of the others.

The newest good versions are, as many as are kept, and those that labels point at. A bad bundle is
refused, its reason is kept, and it is tried again only when its files have changed. Whatever
happens, a model that is served goes on being served.

Everything here is slow and runs in a thread, one call at a time; it changes nothing that is served.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, TypeVar

from service.bundle.manifest import read_manifest
from service.errors import DSSError, FileUnreadable
from service.repository import folder, version_labels
from service.repository.catalog import Entry, Repository
from service.repository.folder import Look, ModelFolder, Stamp
from service.repository.model import Model
from service.repository.version_labels import Labels, LabelsMalformed
from service.telemetry.metrics.registry import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T")
OpenModel = Callable[[str, int, Path], Model]
FILE_PROBLEM = version_labels.FILE  # stands for all labels in Entry.label_problems


@dataclass(frozen=True)
class Known:
    """How a version's files looked when something was last made of them."""

    manifest: Stamp | None = None  # of what is loaded
    refused: Look | None = None  # of what was refused


class Refusal(NamedTuple):
    reason: str
    lasting: bool  # as long as the files are the same; otherwise it may go better next time


class Loader:
    def __init__(
        self, open_model: OpenModel, repository: Repository, metrics: Metrics, keep_versions: int
    ) -> None:
        self._open = open_model
        self._repository = repository
        self._metrics = metrics
        self.keep_versions = keep_versions  # 0: all
        self._known: dict[tuple[str, int], Known] = {}
        self._seen: dict[str, ModelFolder] = {}

    @property
    def seen(self) -> Mapping[str, ModelFolder]:
        """The folders as they were when something was last made of them."""
        return self._seen

    def changed(
        self,
        found: Mapping[str, ModelFolder],
        entries: Mapping[str, Entry],
        unloaded: Collection[str],
    ) -> list[str]:
        """The models for which there may be something to do."""
        return [
            name
            for name in sorted({*found, *entries})
            if self._seen.get(name) != found.get(name)
            or name not in entries
            or entries[name].unloaded != (name in unloaded)
            or self._mended(entries[name], found.get(name))
        ]

    def _mended(self, entry: Entry, found: ModelFolder | None) -> bool:
        """Whether a refused version is worth another try."""
        return found is not None and any(
            folder.file_stamps(found.path / str(version)) != self._of(entry.name, version).refused
            for version in entry.refused
            if version in found.versions
        )

    def forget_look(self, name: str) -> None:
        """What was brought last is not served: it is to be brought again."""
        self._seen.pop(name, None)

    def forget_refusals(self, name: str) -> None:
        for key, known in self._known.items():
            if key[0] == name:
                self._known[key] = replace(known, refused=None)

    def bring(
        self,
        name: str,
        found: ModelFolder | None,
        before: Entry | None,
        *,
        unloaded: bool = False,
        wanted: Labels | None = None,
    ) -> Entry | None:
        """What is to be served of a model, loaded; None if there is nothing of it.

        `wanted` are labels that stand for the file's.
        """
        before = before or Entry(name)
        if unloaded:
            entry = Entry(name, idle=tuple(found.versions) if found else (), unloaded=True)
        elif found is None:
            entry = self._lost(before)
        else:
            work = _Work(self, name, found, before)
            entry = work.entry(*(_labels(found, before) if wanted is None else (wanted, {})))
        self._remember(name, found, entry)
        return entry if found is not None or entry.versions else None

    def _lost(self, before: Entry) -> Entry:
        gone = frozenset(before.versions)
        if gone != before.gone:
            logger.warning("The folder of model %s is gone; it goes on as loaded.", before.name)
        return replace(before, gone=gone, idle=(), refused={})

    def _remember(self, name: str, found: ModelFolder | None, entry: Entry) -> None:
        if found is None:
            self._seen.pop(name, None)
        else:
            self._seen[name] = found
        of_use = {*entry.versions, *entry.refused}
        for key in [key for key in self._known if key[0] == name and key[1] not in of_use]:
            del self._known[key]

    def _of(self, name: str, version: int) -> Known:
        return self._known.get((name, version), Known())

    # --- one version --------------------------------------------------------------------------

    def current(
        self, name: str, version: int, path: Path, have: Model | None, refusal: str | None
    ) -> tuple[Model | None, str | None]:
        """A version as its files are now: what serves, and why its files do not."""
        known = self._of(name, version)
        stamp = folder.manifest_stamp(path)
        if have is not None and (stamp == known.manifest or _is_same(path, have)):
            self._known[name, version] = Known(stamp)
            return have, None
        look = folder.file_stamps(path)  # before it is read: what changes from now on is noticed
        if refusal is not None and look == known.refused:
            return have, refusal
        opened = self._open_or_reason(name, version, path, refusal)
        if isinstance(opened, Model):
            self._known[name, version] = Known(stamp)
            return opened, None
        self._known[name, version] = Known(known.manifest, look if opened.lasting else None)
        return have, opened.reason

    def unchanged_refusal(self, name: str, version: int, path: Path) -> bool:
        return folder.file_stamps(path) == self._of(name, version).refused

    def _open_or_reason(
        self, name: str, version: int, path: Path, before: str | None
    ) -> "Model | Refusal":
        self._repository.loading = (name, version)
        started = perf_counter()
        try:
            model = self._open(name, version, path)
        except Exception as error:
            self._metrics.versions.load_ended(name, "refused")
            refusal = _refusal(error)
            if refusal.reason != before:
                trace = None if isinstance(error, DSSError) else error
                logger.error("Refused %s/%d: %s", name, version, refusal.reason, exc_info=trace)
            return refusal
        finally:
            self._repository.loading = None
        seconds = perf_counter() - started
        self._metrics.versions.load_ended(name, "loaded")
        self._metrics.versions.show_seconds(name, version, seconds)
        logger.info("Loaded %s/%d in %.3f s.", name, version, seconds)
        return model


class _Work:
    """One model's folder being worked through."""

    def __init__(self, loader: Loader, name: str, found: ModelFolder, before: Entry) -> None:
        self._loader = loader
        self._name = name
        self._found = found
        self._before = before
        self._versions: dict[int, Model] = {}
        self._refused: dict[int, str] = {}

    def entry(self, wanted: Labels, problems: Mapping[str, str]) -> Entry:
        found, before = self._found, self._before
        good = 0
        for version in found.versions:
            if good == self._loader.keep_versions > 0:
                break
            good += self._usable(version)
        pointed, problems = self._point(wanted, problems)
        if not self._versions.keys() & found.versions.keys():
            # Nothing that is in the folder is good: what was served goes on.
            self._versions.update(before.versions)
            pointed = {**before.labels, **pointed}
        gone = frozenset(self._versions.keys() - found.versions.keys())
        for version in sorted(gone - before.gone):
            logger.warning("The folder of %s/%d is gone; it goes on.", self._name, version)
        self._keep_refusals()
        return Entry(
            self._name,
            versions=_newest_first(self._versions),
            refused=_newest_first(self._refused),
            idle=tuple(
                version
                for version in found.versions
                if version not in self._versions and version not in self._refused
            ),
            gone=gone,
            labels=pointed,
            label_problems=problems,
        )

    def _usable(self, version: int) -> bool:
        """Whether a version can be served; it is loaded if it must be."""
        if version in self._versions:
            return True
        if version in self._refused:
            return False
        have = self._before.versions.get(version)
        reason = None
        if version in self._found.versions:
            path = self._found.path / str(version)
            refusal = self._before.refused.get(version)
            have, reason = self._loader.current(self._name, version, path, have, refusal)
        if reason is not None:
            self._refused[version] = reason
        if have is not None:
            self._versions[version] = have
        return have is not None

    def _point(
        self, wanted: Labels, problems: Mapping[str, str]
    ) -> tuple[dict[str, int], dict[str, str]]:
        """A label whose new version cannot be served stays where it was."""
        pointed, found_problems = {}, dict(problems)
        for label, version in sorted(wanted.items()):
            if self._usable(version):
                pointed[label] = version
                continue
            reason = self._refused.get(version, "There is no such version.")
            found_problems[label] = f"Version {version} is not loaded: {reason}"
            if found_problems[label] != self._before.label_problems.get(label):
                logger.error("Label %s of %s: %s", label, self._name, found_problems[label])
            old = self._before.labels.get(label)
            if old is not None and self._usable(old):
                pointed[label] = old
        return pointed, found_problems

    def _keep_refusals(self) -> None:
        """Of versions that nobody wants now."""
        for version, reason in self._before.refused.items():
            if (
                version in self._found.versions
                and version not in self._versions
                and version not in self._refused
                and self._loader.unchanged_refusal(
                    self._name, version, self._found.path / str(version)
                )
            ):
                self._refused[version] = reason


def _labels(found: ModelFolder, before: Entry) -> tuple[Labels, Mapping[str, str]]:
    """What the file says; as before, and why, if it is wrong."""
    try:
        return version_labels.parse(found.labels), {}
    except LabelsMalformed as error:
        if FILE_PROBLEM not in before.label_problems:
            logger.error("The labels of %s stay as they are: %s", before.name, error)
        return before.labels, {FILE_PROBLEM: str(error)}


def _refusal(error: Exception) -> Refusal:
    if isinstance(error, FileUnreadable):
        return Refusal(str(error), lasting=False)
    if isinstance(error, DSSError):
        return Refusal(str(error), lasting=True)
    if isinstance(error, OSError) and error.strerror:
        return Refusal(f"The bundle cannot be read: {error.strerror}.", lasting=False)
    if isinstance(error, MemoryError):
        return Refusal("There is not enough memory for the bundle.", lasting=False)
    return Refusal("The bundle could not be opened; the server's log says why.", lasting=True)


def _is_same(path: Path, have: Model) -> bool:
    """Whether a manifest that looks different says the same: touched, or mounted anew."""
    try:
        return read_manifest(path).checksum == have.manifest.checksum
    except (DSSError, OSError):
        return False


def _newest_first(of: Mapping[int, T]) -> dict[int, T]:
    return dict(sorted(of.items(), reverse=True))
