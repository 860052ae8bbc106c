"""Reconciles what is served with the models folder, and with requests to load and unload.

The folder is scanned every few seconds, which works on every kind of file system. A new version is
loaded and warmed up in a thread, then the event loop switches to it in one step. A version that no
longer serves answers the requests it has accepted and is closed.
"""

import asyncio
import ctypes
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import ParamSpec, TypeVar

from service.errors import DSSError, Kind, ModelsFolderMissing
from service.repository import folder as folders
from service.repository import version_labels
from service.repository.catalog import Entry, ModelNotFound, Repository
from service.repository.desired_state import DesiredState, DesiredStateStore
from service.repository.folder import ModelFolder
from service.repository.loader import Loader
from service.repository.model import Model
from service.repository.version_labels import (
    LABEL,
    Aliases,
    LabelNotFound,
    LabelNotMoved,
    LabelsMalformed,
)
from service.telemetry.metrics.registry import Metrics

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

TICK_SECONDS = 0.1  # how soon a worker notices a request that another one took
FOLLOW_SECONDS = 120.0  # how long the others may take to apply it


class LoadFailed(DSSError):
    """The newest version of a model that was to be loaded was refused."""

    kind = Kind.BAD_REQUEST


class WorkersBehind(DSSError):
    """Another worker has not yet applied a request that this one has."""

    kind = Kind.TIMEOUT


class ModelManager:
    def __init__(
        self,
        folder: Path,
        repository: Repository,
        loader: Loader,
        store: DesiredStateStore,
        metrics: Metrics,
        poll_seconds: float,
    ) -> None:
        self._folder = folder
        self._repository = repository
        self._loader = loader
        self._store = store
        self._metrics = metrics
        self._poll_seconds = poll_seconds  # 0: never
        self._applied = 0  # the generation of the desired state
        self._folder_missing = False  # and the log says so
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "loader")
        self._stopping = asyncio.Event()
        self._retiring: set[asyncio.Task[None]] = set()

    # --- from the start of a server to its end ------------------------------------------------

    def load(self) -> None:
        """Load every model, then serve them all; called in a thread, or without an event loop."""
        desired = self._store.read()
        found = folders.scan(self._folder)
        before = self._repository.catalog.entries if self._repository.loaded else {}
        entries = {
            name: self._loader.load_entry(
                name, found.get(name), before.get(name), unloaded=name in desired.unloaded
            )
            for name in sorted({*found, *before})
        }
        self._repository.switch(entries)
        self._update_metrics(before, entries)
        self._metrics.forget_unloaded()
        self._acknowledge(desired)

    async def run(self) -> None:
        """Load every model, then follow the folder and the desired state until `close`."""
        await self._in_thread(self.load)
        scanned = monotonic()
        while not await self._stopped_within(TICK_SECONDS):
            due = 0 < self._poll_seconds <= monotonic() - scanned
            try:
                if due or self._store.read().generation > self._applied:
                    await self._reconcile()
                    scanned = monotonic()
            except Exception:
                logger.exception("Following the models folder failed; it is tried again.")
                scanned = monotonic()

    def stop(self) -> None:
        self._stopping.set()

    async def close(self) -> None:
        self.stop()
        async with self._lock:
            models = list(self._repository.catalog.models()) if self._repository.loaded else []
            for model in models:
                await model.close()
            await asyncio.gather(*self._retiring)
            self._thread.shutdown(wait=False)

    # --- requests of clients ------------------------------------------------------------------

    async def load_model(self, name: str) -> None:
        """Load a model's newest version now, also if it was unloaded or refused before."""
        found = await self._in_thread(folders.scan, self._folder, self._loader.folders)
        if name not in found and name not in self._repository.catalog.entries:
            raise ModelNotFound(f"There is no model {name[:64]!r}.")
        await self._request(lambda desired: desired.load(name))
        entry = self._repository.catalog.entries.get(name, Entry(name))
        newest = max([*entry.versions, *entry.refused, *entry.idle], default=None)
        if newest is None or newest in entry.refused or newest not in entry.versions:
            raise LoadFailed(_why_failed(entry, newest))

    async def unload_model(self, name: str) -> None:
        """Serve no version of a model until a client asks to load it."""
        self._repository.entry(name)
        await self._request(lambda desired: desired.unload(name))

    async def set_alias(self, name: str, alias: str, version: int) -> None:
        """Point an alias at a version. If that cannot be served, nothing changes."""
        if not LABEL.fullmatch(alias):
            raise LabelNotMoved(f"{alias[:40]!r} cannot be a label.")
        async with self._lock:
            before, found = await self._model_in_folder(name)
            aliases = {**_parse(found.aliases), alias: version}
            entry = await self._in_thread(
                self._loader.load_entry, name, found, before, aliases=aliases
            )
            assert entry is not None  # noqa: S101  there is a folder
            try:
                if entry.aliases.get(alias) != version:
                    raise LabelNotMoved(entry.alias_problems[alias])
                self._write_aliases(found.path, lambda current: {**current, alias: version})
            except LabelNotMoved:
                self._loader.forget_folder(name)
                self._repository.forget_tried(name)
                self._retire(entry.versions.values(), serving=before.versions.values())
                raise
            self._switch(name, entry)
        await self._request(DesiredState.rescan)

    async def remove_alias(self, name: str, alias: str) -> None:
        async with self._lock:
            _, found = await self._model_in_folder(name)
            if alias not in _parse(found.aliases):
                raise LabelNotFound(f"Model {name!r} has no label {alias[:40]!r}.")
            self._write_aliases(
                found.path,
                lambda current: {other: to for other, to in current.items() if other != alias},
            )
        await self._request(DesiredState.rescan)

    async def _model_in_folder(self, name: str) -> tuple[Entry, ModelFolder]:
        """A model that is not unloaded, and its folder as it is now."""
        entry = self._repository.entry(name)
        found = await self._in_thread(folders.scan, self._folder, self._loader.folders)
        if name not in found:
            raise LabelNotMoved(f"The folder of model {name!r} is gone.")
        if entry.unloaded:
            raise LabelNotMoved(f"Model {name!r} was unloaded; load it first.")
        return entry, found[name]

    def _write_aliases(self, path: Path, change: Callable[[Aliases], Aliases]) -> None:
        with self._store.locked():
            current = _parse(version_labels.content(path))
            version_labels.write(path, change(current))

    async def _request(self, change: Callable[[DesiredState], DesiredState]) -> None:
        """Change the desired state, and return when all workers have applied it."""
        desired = self._store.update(change)
        await self._reconcile()
        if not await self._store.wait_until_acknowledged(desired.generation, FOLLOW_SECONDS):
            raise WorkersBehind(
                f"Another worker has not followed within {FOLLOW_SECONDS:g} s; it may yet do so."
            )

    # --- following the folder -----------------------------------------------------------------

    async def _reconcile(self) -> None:
        async with self._lock:
            desired = self._store.read()
            requested = desired.requested_since(self._applied)
            found = await self._in_thread(self._scan)
            entries = self._repository.catalog.entries
            changed = await self._in_thread(self._loader.changed, found, entries, desired.unloaded)
            for name in sorted({*changed, *(requested & {*found, *entries})}):
                if self._stopping.is_set():
                    return
                if name in requested:
                    self._loader.forget_refusals(name)
                entry = await self._in_thread(
                    self._loader.load_entry,
                    name,
                    found.get(name),
                    entries.get(name),
                    unloaded=name in desired.unloaded,
                )
                self._switch(name, entry)
            self._acknowledge(desired)

    def _scan(self) -> Mapping[str, ModelFolder]:
        try:
            found: Mapping[str, ModelFolder] = folders.scan(self._folder, self._loader.folders)
        except ModelsFolderMissing as error:
            if not self._folder_missing:
                logger.error("%s The loaded models keep serving.", error)
            self._folder_missing = True
            return dict(self._loader.folders)
        self._folder_missing = False
        return found

    def _switch(self, name: str, entry: Entry | None) -> None:
        before = self._repository.catalog.entries.get(name)
        if entry == before:
            self._repository.forget_tried(name)
            return
        retired = self._repository.switch({name: entry})
        self._update_metrics({} if before is None else {name: before}, {name: entry})
        self._retire(retired)

    def _update_metrics(
        self, before: Mapping[str, Entry], entries: Mapping[str, Entry | None]
    ) -> None:
        for name, entry in entries.items():
            old, new = before.get(name, Entry(name)), entry or Entry(name)
            self._metrics.versions.show_refused(name, old.refused, new.refused)
            self._metrics.versions.show_labels(name, old.aliases, new.aliases)

    def _acknowledge(self, desired: DesiredState) -> None:
        self._applied = desired.generation
        self._store.acknowledge(desired.generation)

    # --- closing models that no longer serve --------------------------------------------------

    def _retire(self, models: Collection[Model], serving: Collection[Model] = ()) -> None:
        for model in models:
            if not any(model is other for other in serving):
                task = asyncio.create_task(self._close_model(model))
                self._retiring.add(task)
                task.add_done_callback(self._retiring.discard)

    async def _close_model(self, model: Model) -> None:
        """Requests that it has accepted are answered first."""
        await model.close()
        self._metrics.forget(model.metrics)
        logger.info("Unloaded %s/%d.", model.name, model.version)
        del model
        await self._in_thread(release_memory)

    # --- waiting ------------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: work(*args, **kwargs))

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._stopping.wait()
        except TimeoutError:
            return False


def release_memory() -> None:
    """Return freed memory to the system; the allocator would keep that of several matrices."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc
        trim(0)


def _parse(content: bytes | None) -> Aliases:
    try:
        return version_labels.parse(content)
    except LabelsMalformed as error:
        raise LabelNotMoved(f"{error} Correct the file first.") from error


def _why_failed(entry: Entry, newest: int | None) -> str:
    if newest is None:
        return f"Model {entry.name!r} has no version."
    reason = entry.refused.get(newest, "It is not loaded.")
    goes_on = "" if entry.chosen is None else f" Version {entry.chosen.version} goes on."
    return f"Version {newest} of model {entry.name!r} was refused: {reason}{goes_on}"
