"""Both clients against real servers that are small, busy, away or late."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.client.clients import Connect
from helpers.fake_engine import FakeEngine
from helpers.server import free_port, in_thread, running, wait_until
from helpers.tiny_bundle import WIDTH, rows_for, write_tiny

from service.client import Client, DeadlineExceeded, Overloaded
from service.http.app import Application, create_app
from service.settings import EngineSettings, Limits, Queue, Settings

ROWS = rows_for(0, 1, 2)


@contextmanager
def served(folder: Path, engine: FakeEngine, **more: Any) -> Iterator[tuple[Application, str]]:
    """A server in this process with limits and an engine of a test's choice, and its URL."""
    write_tiny(folder / "tiny" / "1", labels=False)
    made = Settings(models=folder, engine=EngineSettings(stuck_seconds=60), **more)
    app = create_app(made, engine_factory=lambda *_: engine)
    with in_thread(app) as http:
        wait_until(lambda: http.get("/readyz").status_code == 200)
        try:
            yield app, str(http.base_url).rstrip("/")
        finally:
            engine.release.set()


def test_parts_become_as_small_as_a_server_wants(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.client.async_client.PARTS_AT_ONCE", 1)  # its queue is as small
    limits = Limits(max_rows=300, max_answers=500, max_body_bytes=2000)
    with served(tmp_path, FakeEngine(WIDTH, 10**6), limits=limits) as (_, url):
        client = connect(url)
        for k in (1, 3):
            rows = np.zeros((1000, WIDTH), np.float32)
            rows[:, 0] = np.arange(1000)
            found = client.topk(rows, k=k, timeout=60)
            assert found.classes[:, 0].tolist() == list(range(1000))


def occupied(app: Application, engine: FakeEngine, url: str, stack: ExitStack) -> None:
    """The engine computes one row and another waits: there is no room for a third."""
    engine.hold()
    queue = app.state.service.repository.get().batcher
    waiting = Client(url, timeout=60)
    stack.callback(waiting.close)
    for ready in (lambda: engine.entered.is_set(), lambda: queue.queued_rows == 1):
        thread = threading.Thread(target=waiting.topk, args=([1.0] * WIDTH, 1))
        thread.start()
        stack.callback(thread.join)
        stack.callback(engine.release.set)
        wait_until(ready)


def test_an_overloaded_server_is_asked_again(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(WIDTH)
    pauses: list[float] = []
    tight = {"limits": Limits(max_rows=1), "queue": Queue(max_rows=1)}
    with served(tmp_path, engine, **tight) as (app, url), ExitStack() as stack:
        queue = app.state.service.repository.get().batcher

        def pass_by(seconds: float) -> None:
            """Instead of sleeping: what was in the way goes."""
            pauses.append(seconds)
            engine.release.set()
            wait_until(lambda: queue.queued_rows == 0)

        async def pass_by_soon(seconds: float) -> None:
            await asyncio.to_thread(pass_by, seconds)

        monkeypatch.setattr("service.client.client.sleep", pass_by)
        monkeypatch.setattr("service.client.async_client.sleep", pass_by_soon)
        occupied(app, engine, url, stack)
        with pytest.raises(Overloaded) as failure:
            connect(url, retries=0).topk([5.0] * WIDTH, 1)
        assert (failure.value.status, failure.value.tries) == (429, 1)
        assert connect(url).topk([5.0] * WIDTH, 1).classes.tolist() == [[5]]
        assert 1.0 <= pauses[0] <= 1.2  # Retry-After, and a share of chance


def test_a_server_that_starts_again_is_waited_for(
    connect: Connect, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    with ExitStack() as stack:

        def start(seconds: float) -> None:
            """Instead of sleeping."""
            assert 0.0 <= seconds <= 0.2
            stack.enter_context(running(models, tmp_path / "log", port=port))

        async def start_soon(seconds: float) -> None:
            await asyncio.to_thread(start, seconds)

        monkeypatch.setattr("service.client.client.sleep", start)
        monkeypatch.setattr("service.client.async_client.sleep", start_soon)
        client = connect(f"http://127.0.0.1:{port}", timeout=60, retries=1)
        assert client.ready() is False
        assert client.topk(ROWS, model="tiny", k=2).classes.shape == (3, 2)
        assert client.ready() is True


def test_the_server_stops_when_nobody_waits_any_more(connect: Connect, tmp_path: Path) -> None:
    engine = FakeEngine(WIDTH)
    with served(tmp_path, engine) as (app, url), ExitStack() as stack:
        occupied(app, engine, url, stack)
        queue = app.state.service.repository.get().batcher
        under_way = len(engine.calls)
        with pytest.raises(DeadlineExceeded):
            connect(url, timeout=0.1).topk([5.0] * WIDTH, 1)
        wait_until(lambda: queue.queued_rows == 1)
        engine.release.set()
        wait_until(lambda: queue.queued_rows == 0)
        assert connect(url).topk([6.0] * WIDTH, 1).classes.tolist() == [[6]]
        # The one that waited and the last, a row each: the late one was in neither call.
        assert engine.calls[under_way:] == [(1, 1, 1)] * 2
