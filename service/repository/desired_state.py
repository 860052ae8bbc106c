"""Which models clients have asked to unload, or to load again now.

These requests hold until the server ends. Several workers keep them in a file of their shared
folder, and each publishes the generation that it has applied, so that the worker that took a
request can wait until all workers have applied it.
"""

import asyncio
import fcntl
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic

from service.shared_state.counters import Counters
from service.shared_state.worker_table import WorkerTable

FILE = "repository.json"
APPLIED = ("applied",)  # the block of counters that holds the generation a worker has applied
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class DesiredState:
    generation: int = 0
    unloaded: tuple[str, ...] = ()
    load_requests: Mapping[str, int] = field(default_factory=dict)  # model -> generation

    def load(self, name: str) -> "DesiredState":
        """The model is no longer unloaded, and its folder is read again."""
        generation = self.generation + 1
        unloaded = tuple(other for other in self.unloaded if other != name)
        return DesiredState(generation, unloaded, {**self.load_requests, name: generation})

    def unload(self, name: str) -> "DesiredState":
        unloaded = tuple(sorted({*self.unloaded, name}))
        return DesiredState(self.generation + 1, unloaded, self.load_requests)

    def rescan(self) -> "DesiredState":
        """All workers read the models folder again."""
        return replace(self, generation=self.generation + 1)

    def requested_since(self, generation: int) -> set[str]:
        """The models that were to be loaded in a later generation."""
        return {name for name, at in self.load_requests.items() if at > generation}


class DesiredStateStore(ABC):
    @abstractmethod
    def read(self) -> DesiredState: ...

    @abstractmethod
    def update(self, change: Callable[[DesiredState], DesiredState]) -> DesiredState:
        """Store the changed state; no other worker changes it meanwhile."""

    @abstractmethod
    def acknowledge(self, generation: int) -> None:
        """This process has applied a generation."""

    @abstractmethod
    async def wait_until_acknowledged(self, generation: int, seconds: float) -> bool:
        """Whether all workers have applied a generation within so many seconds."""

    @abstractmethod
    def locked(self) -> AbstractContextManager[None]:
        """Keeps other workers out. Only for an instant, since the event loop waits."""


class LocalStateStore(DesiredStateStore):
    """The store of a server that is one process."""

    def __init__(self) -> None:
        self._state = DesiredState()

    def read(self) -> DesiredState:
        return self._state

    def update(self, change: Callable[[DesiredState], DesiredState]) -> DesiredState:
        self._state = change(self._state)
        return self._state

    def acknowledge(self, generation: int) -> None:
        del generation

    async def wait_until_acknowledged(self, generation: int, seconds: float) -> bool:
        del generation, seconds
        return True

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()


class SharedStateStore(DesiredStateStore):
    """The store of one of several workers; `folder` belongs to the workers of one server."""

    def __init__(
        self, folder: Path, counters: Counters, read_workers: Callable[[], WorkerTable]
    ) -> None:
        self._file = folder / FILE
        self._lock = folder / f"{FILE}.lock"
        self._counters = counters
        self._read_workers = read_workers

    def read(self) -> DesiredState:
        try:
            return DesiredState(**json.loads(self._file.read_bytes()))
        except FileNotFoundError:
            return DesiredState()

    def update(self, change: Callable[[DesiredState], DesiredState]) -> DesiredState:
        with self.locked():
            state = change(self.read())
            unfinished = self._file.with_suffix(f".{os.getpid()}.new")
            unfinished.write_text(json.dumps(asdict(state)))
            unfinished.rename(self._file)
        return state

    def acknowledge(self, generation: int) -> None:
        self._counters.block(APPLIED, 1)[0] = generation

    async def wait_until_acknowledged(self, generation: int, seconds: float) -> bool:
        until = monotonic() + seconds
        while not self._all_acknowledged(generation):
            if monotonic() > until:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    def _all_acknowledged(self, generation: int) -> bool:
        applied = {block.worker: block.values[0] for block in self._counters.blocks(APPLIED)}
        return all(applied.get(worker, -1) >= generation for worker in self._read_workers().workers)

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self._lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
