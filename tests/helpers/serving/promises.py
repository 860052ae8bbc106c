"""A server in this process whose fake engine can answer exactly and has a contract."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from helpers.fake_engine import CONTRACT, FakeEngine
from helpers.server import in_thread, wait_until
from helpers.tiny_bundle import WIDTH, write_tiny

from service.http.app import Application, create_app
from service.settings import AnswerSettings, Settings

# The fake engine escalates rows whose last number is not zero.
EASY = [1.0, 0.0, 0.0, 0.0]
HARD = [2.0, 0.0, 0.0, 1.0]
assert len(EASY) == len(HARD) == WIDTH


class Served(NamedTuple):
    http: httpx.Client
    app: Application
    engine: FakeEngine

    def post(self, **fields: Any) -> httpx.Response:
        return self.http.post("/topk", json={"inputs": [EASY, HARD], "k": 2, **fields})

    def answer(self, **fields: Any) -> dict[str, Any]:
        response = self.post(**fields)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def shift(self, *, shifted: bool = True) -> None:
        """As if drift had passed its alert."""
        self.app.state.service.repository.get().metrics.drift.shifted = shifted

    def counted(self, metric: str, **labels: str) -> float:
        registry = self.app.state.service.metrics.registry
        value = registry.get_sample_value(metric, {"model": "tiny", "version": "1", **labels})
        assert value is not None, metric
        return float(value)


@contextmanager
def serving_promises(
    folder: Path, engine: FakeEngine | None = None, *, recall: float | None = None, **more: Any
) -> Iterator[Served]:
    on_drift = more.pop("on_drift", "report")
    engine = engine or FakeEngine(WIDTH, contract=CONTRACT)
    write_tiny(folder / "tiny" / "1", labels=False)
    answers = AnswerSettings(recall=recall, on_drift=on_drift)
    app = create_app(
        Settings(models=folder, answers=answers, **more), engine_factory=lambda *_: engine
    )
    with in_thread(app) as http:
        wait_until(lambda: http.get("/readyz").status_code == 200)
        yield Served(http, app, engine)
