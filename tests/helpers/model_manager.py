"""A repository and its keeper, for tests without a server."""

import asyncio
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from service.batching.threads import EngineThreads
from service.engine import Engine
from service.repository.catalog import Entry, Repository
from service.repository.desired_state import LocalStateStore
from service.repository.loader import Loader
from service.repository.manager import ModelManager
from service.repository.model import EngineFactory, Model, open_model
from service.repository.room import UNCHECKED, Room
from service.settings import Settings
from service.telemetry.metrics.registry import Metrics


class Kept:
    """Nothing happens but when a test says so."""

    def __init__(
        self,
        folder: Path,
        default_model: str | None = None,
        *,
        keep_versions: int = 2,
        engine_factory: EngineFactory = Engine,
        room: Room = UNCHECKED,
    ) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.repository = Repository(default_model)
        self.threads = EngineThreads.of(cpus=1)
        self.opened: list[tuple[str, int]] = []
        opener = partial(
            open_model,
            settings=Settings(),
            metrics=self.metrics,
            engine_factory=engine_factory,
            room=room,
            threads=self.threads,
        )

        def counting_opener(name: str, version: int, path: Path) -> Model:
            self.opened.append((name, version))
            return opener(name, version, path)

        loader = Loader(counting_opener, self.repository, self.metrics, keep_versions)
        self.keeper = ModelManager(
            folder, self.repository, loader, LocalStateStore(), self.metrics, 0
        )

    def load(self) -> "Kept":
        self.keeper.load()
        return self

    async def look(self) -> None:
        await self.keeper._reconcile()

    async def settled(self) -> None:
        """What no longer serves has been let go."""
        await asyncio.gather(*self.keeper._retiring)

    def get(self, name: str | None = None, version: str | None = None) -> Model:
        return self.repository.get(name, version)

    def entry(self, name: str) -> Entry:
        return self.repository.entry(name)

    def close(self) -> None:
        asyncio.run(self.keeper.close())
        self.threads.close()

    def series(self, name: str) -> list[str]:
        lines = generate_latest(self.metrics.registry).decode().splitlines()
        return [line for line in lines if line.startswith(name)]
