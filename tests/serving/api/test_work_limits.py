"""No request costs more than it may: over HTTP, of bodies, answers and searches."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import orjson
import pytest
from helpers.fake_engine import FakeEngine
from helpers.npy_bytes import npy_bytes
from helpers.server import in_thread, wait_until
from helpers.tiny_bundle import WIDTH, rows_for, write_tiny

from service.batching.queue import BatchKey
from service.http.app import Application, create_app
from service.http.inference import routes
from service.http.inference.routes import Place
from service.settings import Limits, Queue, Settings

MIB = 2**20
EMPTY_ROWS = b'{"inputs":[' + b"[]," * (8 * MIB // 3 - 10) + b"[]]}"
ZEROS = npy_bytes(np.zeros((4096, 256), np.float16))


@contextmanager
def served(
    folder: Path, settings: Settings | None = None, engine: FakeEngine | None = None
) -> Iterator[tuple[httpx.Client, Application]]:
    write_tiny(folder / "tiny" / "1")
    settings = (settings or Settings()).model_copy(update={"models": folder})
    app = create_app(settings, engine_factory=None if engine is None else lambda *_: engine)
    with in_thread(app) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200)
        client.headers["content-type"] = "application/json"
        yield client, app


def problem(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["type"].removeprefix("urn:dss:problem:")


def json_body(rows: int, **more: object) -> bytes:
    return orjson.dumps({"inputs": np.tile(rows_for(0), (rows, 1)).tolist(), **more})


# --- bodies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/topk", "/v2/models/tiny/infer"])
@pytest.mark.parametrize(
    "content", [EMPTY_ROWS, bytes(8 * MIB), b" " * 8 * MIB], ids=["rows", "zeros", "spaces"]
)
def test_a_bomb_is_refused_without_being_expanded(
    tmp_path: Path, path: str, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def expand(*_: object) -> None:
        raise AssertionError("The bomb was expanded.")

    monkeypatch.setattr("service.http.compression.expand", expand)
    headers = {"content-encoding": "gzip"}
    with served(tmp_path) as (client, _):
        response = client.post(path, content=gzip.compress(content), headers=headers)
        assert response.status_code == 413
        assert "compressed bytes may hold" in response.text


def test_too_many_rows_are_refused_after_a_piece(tmp_path: Path) -> None:
    with served(tmp_path) as (client, app):
        response = client.post(
            "/topk", content=EMPTY_ROWS, headers={"content-type": "application/json"}
        )
        assert problem(response) == (413, "too-many-rows")
        assert app.state.service.budget.taken == 0


def test_a_large_body_is_answered_as_small_ones_are(tmp_path: Path) -> None:
    with served(tmp_path) as (client, app):
        rows = np.random.default_rng(0).normal(size=(4096, WIDTH)).astype(np.float32)
        body = orjson.dumps({"inputs": rows.tolist(), "k": 2, "experts": 2})
        assert len(body) > 4 * 65_536
        whole = client.post("/topk", content=body).raise_for_status().json()
        packed = gzip.compress(body)
        unpacked = client.post("/topk", content=packed, headers={"content-encoding": "gzip"})
        assert unpacked.raise_for_status().json() == whole
        for first in (0, 1000, 4090):
            part = rows[first : first + 6].tolist()
            answer = client.post("/topk", json={"inputs": part, "k": 2, "experts": 2}).json()
            for name in ("classes", "log_probs", "labels", "experts", "gates"):
                assert whole[name][first : first + 6] == answer[name]
        assert app.state.service.budget.taken == 0


def test_large_bodies_wait_only_so_long(tmp_path: Path) -> None:
    body = json_body(4096)
    with served(tmp_path) as (client, app):
        pieces = app.state.service.pieces
        # As if another body were being decoded, as long as this one.
        pieces._waiting.append(SimpleNamespace(size=len(body)))
        pieces._seconds_per_byte = 1.0
        assert problem(client.post("/topk", content=body)) == (429, "too-much-to-decode")
        assert client.post("/topk", content=json_body(1)).status_code == 200
        pieces._waiting.clear()
        assert client.post("/topk", content=body).status_code == 200


# --- answers and searches ----------------------------------------------------------------------


def test_an_answer_that_could_be_too_large_is_refused_before_it_is_computed(tmp_path: Path) -> None:
    engine = FakeEngine(WIDTH)
    limits = Limits(max_answer_bytes=100_000)
    with served(tmp_path, Settings(limits=limits), engine) as (client, _):
        calls = len(engine.calls)
        body = npy_bytes(np.tile(rows_for(0), (400, 1)))
        headers = {"content-type": "application/x-npy"}
        response = client.post("/topk?k=10", content=body, headers=headers)
        assert problem(response) == (413, "answer-too-large")
        assert len(engine.calls) == calls
        # Without labels and as numbers it is small enough.
        headers["accept"] = "application/x-npy"
        assert client.post("/topk?k=10", content=body, headers=headers).status_code == 200


@pytest.mark.parametrize("labels", [True, False])
def test_no_answer_is_larger_than_was_reckoned(tmp_path: Path, labels: bool) -> None:
    write_tiny(tmp_path / "tiny" / "1", labels=labels)
    settings = Settings(models=tmp_path)
    app = create_app(settings)
    with in_thread(app) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200)
        target = app.handlers["native"].target(_default_place())
        rows = np.random.default_rng(0).normal(size=(500, WIDTH)).astype(np.float32)
        response = client.post("/topk", json={"inputs": rows.tolist(), "k": 10, "experts": 3})
        per_row = 40  # its expert and gate value
        assert len(response.content) < 500 * (10 * target.json_bytes + per_row) + 200


def _default_place() -> Place:
    found = routes.find("/topk")
    assert found is not None
    return found


def test_rows_times_classes_are_bounded(tmp_path: Path) -> None:
    limits = Limits(max_scores=1000)
    with served(tmp_path, Settings(limits=limits)) as (client, _):
        assert client.post("/topk", content=json_body(20, k=2)).status_code == 200
        response = client.post("/topk", content=json_body(60, k=2, experts=3))
        assert problem(response) == (413, "too-much-to-search")
        assert "fewer rows or fewer experts" in response.json()["detail"]


def test_a_long_request_leaves_others_their_answers(tmp_path: Path) -> None:
    """While one is computed, others are answered, and a second long one is refused."""
    engine = FakeEngine(WIDTH)
    queue = Queue(max_batch_seconds=0.01)
    with served(tmp_path, Settings(queue=queue), engine) as (client, app):
        batcher = app.state.service.repository.get().batcher
        batcher._cost.learn(BatchKey(2, 1), 1, 1.0)
        engine.hold()
        statuses: list[int] = []
        body = json_body(3, k=2)
        first = threading.Thread(
            target=lambda: statuses.append(client.post("/topk", content=body).status_code)
        )
        first.start()
        try:
            assert engine.entered.wait(30)
            response = client.post("/topk", content=body)
            assert problem(response) == (429, "queue-full")
            response = client.post("/topk", content=body, headers={"dss-timeout": "0.5"})
            assert response.status_code in (429, 504)
        finally:
            engine.release.set()
            first.join()
        assert statuses == [200]
