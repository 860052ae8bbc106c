"""Keeps what is served in step with the models folder, and with what somebody has said.

The folder is looked at every few seconds, which works on every kind of file system. A new version
is loaded and warmed up in a thread, then the event loop switches to it in one step; what no longer
serves answers what it has taken, and is let go.
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
from service.repository.version_labels import LABEL, LabelNotFound, LabelNotMoved, LabelsMalformed
from service.telemetry.metrics.registry import Metrics

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

TICK_SECONDS = 0.1  # how soon a worker hears what was said to another
FOLLOW_SECONDS = 120.0  # how long the others may take to do it


class LoadFailed(DSSError):
    """What was to be loaded was refused."""

    kind = Kind.BAD_REQUEST


class WorkersBehind(DSSError):
    """Another worker has not yet done what this one has."""

    kind = Kind.TIMEOUT


class ModelManager:
    def __init__(
        self,
        folder: Path,
        repository: Repository,
        loader: Loader,
        board: DesiredStateStore,
        metrics: Metrics,
        poll_seconds: float,
    ) -> None:
        self._folder = folder
        self._repository = repository
        self._loader = loader
        self._board = board
        self._metrics = metrics
        self._poll_seconds = poll_seconds  # 0: never
        self._applied = 0  # the generation of what was said
        self._missing = False  # the whole folder, as was said in the log
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "loader")
        self._stopping = asyncio.Event()
        self._retiring: set[asyncio.Task[None]] = set()

    # --- the life of a server -----------------------------------------------------------------

    def load(self) -> None:
        """Read every model. Nothing is served before the end; for a thread, or no event loop."""
        said = self._board.read()
        found = folders.scan(self._folder)
        before = self._repository.catalog.entries if self._repository.loaded else {}
        entries = {
            name: self._loader.bring(
                name, found.get(name), before.get(name), unloaded=name in said.unloaded
            )
            for name in sorted({*found, *before})
        }
        self._repository.switch(entries)
        self._show(before, entries)
        self._metrics.forget_strangers()
        self._done(said)

    async def run(self) -> None:
        """Load everything, then follow what happens, until `close`."""
        await self._in_thread(self.load)
        looked = monotonic()
        while not await self._stopped_within(TICK_SECONDS):
            due = 0 < self._poll_seconds <= monotonic() - looked
            try:
                if due or self._board.read().generation > self._applied:
                    await self._look()
                    looked = monotonic()
            except Exception:
                logger.exception("Looking at the models failed.")
                looked = monotonic()

    def stop(self) -> None:
        self._stopping.set()

    async def close(self) -> None:
        self.stop()
        async with self._turn:
            models = list(self._repository.catalog.models()) if self._repository.loaded else []
            for model in models:
                await model.close()
            await asyncio.gather(*self._retiring)
            self._thread.shutdown(wait=False)

    # --- what somebody says -------------------------------------------------------------------

    async def load_model(self, name: str) -> None:
        """Look at a model now, whatever was said or refused before; its newest version serves."""
        found = await self._in_thread(folders.scan, self._folder, self._loader.seen)
        if name not in found and name not in self._repository.catalog.entries:
            raise ModelNotFound(f"There is no model {name[:64]!r}.")
        await self._say(lambda said: said.load(name))
        entry = self._repository.catalog.entries.get(name, Entry(name))
        newest = max([*entry.versions, *entry.refused, *entry.idle], default=None)
        if newest is None or newest in entry.refused or newest not in entry.versions:
            raise LoadFailed(_why_failed(entry, newest))

    async def unload_model(self, name: str) -> None:
        """Serve nothing of a model until somebody loads it."""
        self._repository.entry(name)
        await self._say(lambda said: said.unload(name))

    async def set_label(self, name: str, label: str, version: int) -> None:
        """Point a label at a version that can be served; otherwise nothing changes."""
        if not LABEL.fullmatch(label):
            raise LabelNotMoved(f"{label[:40]!r} cannot be a label.")
        async with self._turn:
            entry, found = await self._present(name)
            wanted = {**_current(found), label: version}
            brought = await self._in_thread(self._loader.bring, name, found, entry, wanted=wanted)
            assert brought is not None  # noqa: S101  there is a folder
            try:
                if brought.labels.get(label) != version:
                    raise LabelNotMoved(brought.label_problems[label])
                self._write(found.path, lambda current: {**current, label: version})
            except LabelNotMoved:
                self._loader.forget_look(name)
                self._retire(brought.versions.values(), serving=entry.versions.values())
                raise
            self._switch(name, brought)
        await self._say(DesiredState.look)

    async def remove_label(self, name: str, label: str) -> None:
        async with self._turn:
            _, found = await self._present(name)
            if label not in _current(found):
                raise LabelNotFound(f"Model {name!r} has no label {label[:40]!r}.")
            self._write(
                found.path,
                lambda current: {other: to for other, to in current.items() if other != label},
            )
        await self._say(DesiredState.look)

    async def _present(self, name: str) -> tuple[Entry, ModelFolder]:
        """A model that has a folder now and is not unloaded."""
        entry = self._repository.entry(name)
        found = await self._in_thread(folders.scan, self._folder, self._loader.seen)
        if name not in found:
            raise LabelNotMoved(f"The folder of model {name!r} is gone.")
        if entry.unloaded:
            raise LabelNotMoved(f"Model {name!r} was unloaded; load it first.")
        return entry, found[name]

    def _write(
        self, path: Path, change: Callable[[version_labels.Labels], version_labels.Labels]
    ) -> None:
        with self._board.alone():
            current = _parsed(version_labels.content(path))
            version_labels.write(path, change(current))

    async def _say(self, change: Callable[[DesiredState], DesiredState]) -> None:
        """Say it to all workers, and come back when all have done it."""
        said = self._board.say(change)
        await self._look()
        if not await self._board.all_applied(said.generation, FOLLOW_SECONDS):
            raise WorkersBehind(
                f"Another worker has not followed within {FOLLOW_SECONDS:g} s; it may yet do so."
            )

    # --- looking ------------------------------------------------------------------------------

    async def _look(self) -> None:
        async with self._turn:
            said = self._board.read()
            fresh = said.since(self._applied)
            found = await self._in_thread(self._scan)
            entries = self._repository.catalog.entries
            changed = await self._in_thread(self._loader.changed, found, entries, said.unloaded)
            for name in sorted({*changed, *(fresh & {*found, *entries})}):
                if self._stopping.is_set():
                    return
                if name in fresh:
                    self._loader.forget_refusals(name)
                entry = await self._in_thread(
                    self._loader.bring,
                    name,
                    found.get(name),
                    entries.get(name),
                    unloaded=name in said.unloaded,
                )
                self._switch(name, entry)
            self._done(said)

    def _scan(self) -> Mapping[str, ModelFolder]:
        try:
            found: Mapping[str, ModelFolder] = folders.scan(self._folder, self._loader.seen)
        except ModelsFolderMissing as error:
            if not self._missing:
                logger.error("%s What is loaded goes on.", error)
            self._missing = True
            return dict(self._loader.seen)
        self._missing = False
        return found

    def _switch(self, name: str, entry: Entry | None) -> None:
        before = self._repository.catalog.entries.get(name)
        if entry == before:
            return
        retired = self._repository.switch({name: entry})
        self._show({} if before is None else {name: before}, {name: entry})
        self._retire(retired)

    def _show(self, before: Mapping[str, Entry], entries: Mapping[str, Entry | None]) -> None:
        for name, entry in entries.items():
            old, new = before.get(name, Entry(name)), entry or Entry(name)
            self._metrics.versions.show_refused(name, old.refused, new.refused)
            self._metrics.versions.show_labels(name, old.labels, new.labels)

    def _done(self, said: DesiredState) -> None:
        self._applied = said.generation
        self._board.applied(said.generation)

    # --- letting go ---------------------------------------------------------------------------

    def _retire(self, models: Collection[Model], serving: Collection[Model] = ()) -> None:
        for model in models:
            if not any(model is other for other in serving):
                task = asyncio.create_task(self._let_go(model))
                self._retiring.add(task)
                task.add_done_callback(self._retiring.discard)

    async def _let_go(self, model: Model) -> None:
        """What it has taken is answered first."""
        await model.close()
        self._metrics.forget(model.metrics)
        logger.info("Unloaded %s/%d.", model.name, model.version)
        del model
        await self._in_thread(give_back)

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


def give_back() -> None:
    """The allocator keeps what was freed unless asked; of large matrices it would keep several."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc
        trim(0)


def _current(found: ModelFolder) -> version_labels.Labels:
    return _parsed(found.labels)


def _parsed(content: bytes | None) -> version_labels.Labels:
    try:
        return version_labels.parse(content)
    except LabelsMalformed as error:
        raise LabelNotMoved(f"{error} Mend it first.") from error


def _why_failed(entry: Entry, newest: int | None) -> str:
    if newest is None:
        return f"Model {entry.name!r} has no version."
    reason = entry.refused.get(newest, "It is not loaded.")
    goes_on = "" if entry.chosen is None else f" Version {entry.chosen.version} goes on."
    return f"Version {newest} of model {entry.name!r} was refused: {reason}{goes_on}"
