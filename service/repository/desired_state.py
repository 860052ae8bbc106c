"""What somebody has said about models: unload this one, look at that one now.

It holds until the server ends. Several workers have it in a file of their folder, and each shows
how much of it it has done, so that an answer can mean: all of them have.
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
APPLIED = ("applied",)
ASK_SECONDS = 0.02


@dataclass(frozen=True)
class DesiredState:
    generation: int = 0
    unloaded: tuple[str, ...] = ()
    asked: Mapping[str, int] = field(default_factory=dict)  # to look at, and in which generation

    def load(self, name: str) -> "DesiredState":
        """Forget that it was unloaded, and look at it anew."""
        generation = self.generation + 1
        unloaded = tuple(other for other in self.unloaded if other != name)
        return DesiredState(generation, unloaded, {**self.asked, name: generation})

    def unload(self, name: str) -> "DesiredState":
        unloaded = tuple(sorted({*self.unloaded, name}))
        return DesiredState(self.generation + 1, unloaded, self.asked)

    def look(self) -> "DesiredState":
        """Everyone looks at the folder now."""
        return replace(self, generation=self.generation + 1)

    def since(self, generation: int) -> set[str]:
        """Which models were to be looked at after a generation."""
        return {name for name, asked in self.asked.items() if asked > generation}


class DesiredStateStore(ABC):
    @abstractmethod
    def read(self) -> DesiredState: ...

    @abstractmethod
    def say(self, change: Callable[[DesiredState], DesiredState]) -> DesiredState:
        """Nobody else changes it meanwhile."""

    @abstractmethod
    def applied(self, generation: int) -> None:
        """This process has done what was said."""

    @abstractmethod
    async def all_applied(self, generation: int, seconds: float) -> bool:
        """Whether all have, within so many seconds."""

    @abstractmethod
    def alone(self) -> AbstractContextManager[None]:
        """No other worker is in here. Only for an instant: the event loop waits."""


class LocalStateStore(DesiredStateStore):
    """Of a server that is one process."""

    def __init__(self) -> None:
        self._said = DesiredState()

    def read(self) -> DesiredState:
        return self._said

    def say(self, change: Callable[[DesiredState], DesiredState]) -> DesiredState:
        self._said = change(self._said)
        return self._said

    def applied(self, generation: int) -> None:
        del generation

    async def all_applied(self, generation: int, seconds: float) -> bool:
        del generation, seconds
        return True

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()


class SharedStateStore(DesiredStateStore):
    """Of one worker of several; `folder` is theirs alone."""

    def __init__(
        self, folder: Path, cells: Counters, read_roster: Callable[[], WorkerTable]
    ) -> None:
        self._file = folder / FILE
        self._lock = folder / f"{FILE}.lock"
        self._cells = cells
        self._read_roster = read_roster

    def read(self) -> DesiredState:
        try:
            return DesiredState(**json.loads(self._file.read_bytes()))
        except FileNotFoundError:
            return DesiredState()

    def say(self, change: Callable[[DesiredState], DesiredState]) -> DesiredState:
        with self.alone():
            said = change(self.read())
            unfinished = self._file.with_suffix(f".{os.getpid()}.new")
            unfinished.write_text(json.dumps(asdict(said)))
            unfinished.rename(self._file)
        return said

    def applied(self, generation: int) -> None:
        self._cells.block(APPLIED, 1)[0] = generation

    async def all_applied(self, generation: int, seconds: float) -> bool:
        until = monotonic() + seconds
        while not self._all_applied(generation):
            if monotonic() > until:
                return False
            await asyncio.sleep(ASK_SECONDS)
        return True

    def _all_applied(self, generation: int) -> bool:
        shown = {sheet.worker: sheet.values[0] for sheet in self._cells.blocks(APPLIED)}
        return all(shown.get(worker, -1) >= generation for worker in self._read_roster().workers)

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
