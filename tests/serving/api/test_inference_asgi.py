"""The inference routes: messages in, messages out, as any ASGI server would send them."""

import asyncio
import io
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import orjson
import pytest
from helpers.fake_engine import FakeEngine
from helpers.tiny_bundle import WIDTH, rows_for, write_tiny
from numpy.typing import NDArray

from service.http import body as limits
from service.http.app import Application, create_app
from service.http.inference import native
from service.settings import Limits, Queue, Settings
from service.topk import SPARSE, Mode, TopK

Message = dict[str, Any]
Headers = list[tuple[bytes, bytes]]

JSON: Headers = [(b"content-type", b"application/json")]
NPY: Headers = [(b"content-type", b"application/x-npy"), (b"accept", b"application/x-npy")]
ROWS = rows_for(0, 1, 2)
BODY = orjson.dumps({"inputs": ROWS.tolist(), "k": 3})
LOST: Message = {"type": "http.disconnect"}


def chunk(body: bytes, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def npy_bytes(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


class Exchange:
    """One request: what the application is told, and what it says."""

    def __init__(self, *messages: Message) -> None:
        self._messages = list(messages)
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if not self._messages:
            await asyncio.Event().wait()  # nothing more will come
        return self._messages.pop(0)

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def ask(
        self, app: Application, headers: Headers, path: str = "/topk", query: bytes = b""
    ) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": query,
            "headers": headers,
            "app": app,
        }
        await app(scope, self.receive, self.send)

    @property
    def answer(self) -> list[Message]:
        """What was sent, but for the name that each request gets."""
        first, *rest = self.sent
        headers = [header for header in first["headers"] if header[0] != b"x-request-id"]
        return [first | {"headers": headers}, *rest]

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def problem(self) -> str:
        kind: str = orjson.loads(self.body)["type"]
        return kind.removeprefix("urn:dss:problem:")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny(tmp_path / "tiny" / "1")
    return tmp_path


@contextmanager
def loaded(settings: Settings, engine: FakeEngine | None = None) -> Iterator[Application]:
    app = create_app(settings, engine_factory=None if engine is None else lambda *_: engine)
    manager = app.state.service.manager
    manager.load()
    yield app
    if engine is not None:
        engine.release.set()
    asyncio.run(manager.close())


@pytest.fixture
def app(folder: Path) -> Iterator[Application]:
    with loaded(Settings(models=folder, limits=Limits(max_body_bytes=4096))) as made:
        yield made


def counted(app: Application, name: str, **labels: str) -> float:
    return app.state.service.metrics.registry.get_sample_value(name, labels) or 0.0


def answer(app: Application, headers: Headers, *messages: Message, **more: Any) -> Exchange:
    exchange = Exchange(*messages)
    asyncio.run(exchange.ask(app, headers, **more))
    return exchange


def test_a_path_that_only_looks_like_inference_is_not_answered(app: Application) -> None:
    exchange = answer(app, JSON, chunk(BODY), path="/topk\n")
    assert exchange.status in (403, 404)


# --- bodies ----------------------------------------------------------------------------------


def test_a_body_in_pieces_is_answered_as_a_whole_one(app: Application) -> None:
    whole = answer(app, JSON, chunk(BODY))
    assert whole.status == 200
    pieces = [chunk(BODY[i : i + 7], more=True) for i in range(0, len(BODY), 7)]
    for last in (chunk(b""), {"type": "http.request"}):
        split = answer(app, JSON, *pieces, last)
        assert split.answer == whole.answer


def test_a_body_that_comes_later_is_waited_for(app: Application) -> None:
    async def scenario() -> Exchange:
        exchange = Exchange()
        arrived = asyncio.Event()

        async def receive() -> Message:
            await arrived.wait()
            return chunk(BODY)

        exchange.receive = receive  # type: ignore[method-assign]
        task = asyncio.create_task(exchange.ask(app, JSON))
        await asyncio.sleep(0)
        assert exchange.sent == []
        arrived.set()
        await task
        return exchange

    assert asyncio.run(scenario()).answer == answer(app, JSON, chunk(BODY)).answer


@pytest.mark.parametrize(
    ("headers", "messages"),
    [
        ([(b"content-length", b"4097")], []),
        ([(b"content-length", b"9" * 50)], []),
        ([], [chunk(b" " * 4097)]),
        ([], [chunk(b" " * 4000, more=True), chunk(b" " * 97)]),
        ([(b"content-length", b"10")], [chunk(b" " * 4097, more=True)]),
        ([(b"content-length", b"x")], [chunk(b" " * 4097)]),
    ],
)
def test_a_body_beyond_the_limit_is_413_and_ends_the_connection(
    app: Application, headers: Headers, messages: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.http.inference.asgi.LINGER_SECONDS", 0.01)
    exchange = answer(app, JSON + headers, *messages)
    assert (exchange.status, exchange.problem) == (413, "body-too-large")
    assert exchange.headers[b"connection"] == b"close"
    assert counted(app, "dss_rejected_requests_total", model="tiny", reason="body_too_large") == 1


def test_a_body_at_the_limit_is_read(app: Application) -> None:
    assert answer(app, JSON, chunk(BODY + b" " * (4096 - len(BODY)))).status == 200


@pytest.mark.parametrize("messages", [[], [chunk(b"{", more=True)]])
def test_a_slow_body_is_408(
    folder: Path, messages: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.http.inference.asgi.LINGER_SECONDS", 0.01)
    with loaded(Settings(models=folder, limits=Limits(body_seconds=0.01))) as app:
        exchange = answer(app, JSON, *messages)
        assert (exchange.status, exchange.problem) == (408, "body-timeout")


@pytest.mark.parametrize("messages", [[LOST], [chunk(b'{"inputs', more=True), LOST]])
@pytest.mark.parametrize("path", ["/topk", "/v2/models/tiny/infer"])
def test_a_client_that_leaves_gets_no_answer_and_is_not_counted(
    app: Application, messages: list[Message], path: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert answer(app, JSON, *messages, path=path).sent == []
    assert "Traceback" not in caplog.text
    for status in ("200", "400", "500"):
        assert not counted(app, "dss_http_requests_total", route=path, method="POST", status=status)


def test_a_wait_for_the_body_can_be_cancelled(app: Application) -> None:
    async def scenario() -> list[Message]:
        exchange = Exchange()
        task = asyncio.create_task(exchange.ask(app, JSON))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return exchange.sent

    assert asyncio.run(scenario()) == []


def test_whatever_receive_is_it_is_awaited() -> None:
    async def scenario() -> bytes:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Message] = loop.create_future()
        loop.call_soon(future.set_result, chunk(b"late"))
        receive: Callable[[], Awaitable[Message]] = lambda: future  # noqa: E731
        return await limits.read_body(receive, None, Limits(), limits.ByteBudget(100))

    assert asyncio.run(scenario()) == b"late"


# --- headers and answers ---------------------------------------------------------------------


def test_the_answer_says_its_length_type_and_model(app: Application) -> None:
    exchange = answer(app, NPY, chunk(npy_bytes(ROWS)), query=b"k=3")
    assert dict(exchange.answer[0]["headers"]) == {
        b"dss-model": b"tiny",
        b"dss-model-version": b"1",
        b"content-length": b"%d" % len(exchange.body),
        b"content-type": b"application/x-npy",
    }
    records = np.load(io.BytesIO(exchange.body), allow_pickle=False)
    assert records["classes"].shape == (3, 3)


def test_several_accept_headers_are_one_list(app: Application) -> None:
    headers = [*JSON, (b"accept", b"text/html"), (b"accept", b"application/x-npy")]
    assert answer(app, headers, chunk(BODY)).headers[b"content-type"] == b"application/x-npy"
    assert answer(app, headers[:2], chunk(BODY)).problem == "not-acceptable"


def test_one_row_is_encoded_as_it_would_be_among_others(app: Application) -> None:
    together = np.load(
        io.BytesIO(answer(app, NPY, chunk(npy_bytes(ROWS)), query=b"k=4").body), allow_pickle=False
    )
    for number in range(len(ROWS)):
        exchange = answer(app, NPY, chunk(npy_bytes(ROWS[number : number + 1])), query=b"k=4")
        alone = np.load(io.BytesIO(exchange.body), allow_pickle=False)
        assert alone.dtype == together.dtype
        np.testing.assert_array_equal(alone["classes"][0], together["classes"][number])
        np.testing.assert_array_equal(alone["experts"][0], together["experts"][number])
        np.testing.assert_allclose(alone["log_probs"][0], together["log_probs"][number], atol=1e-6)
        np.testing.assert_allclose(alone["gates"][0], together["gates"][number], atol=1e-6)


def test_requests_of_one_turn_are_joined_and_answered_as_single_ones(app: Application) -> None:
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(1 + i % 3, WIDTH)).astype(np.float32) for i in range(16)]
    bodies = [orjson.dumps({"inputs": batch.tolist(), "k": 5}) for batch in batches]
    singles = [answer(app, JSON, chunk(body)) for body in bodies]
    before = counted(app, "dss_executions_total", model="tiny", version="1")

    async def together() -> list[Exchange]:
        exchanges = [Exchange(chunk(body)) for body in bodies]
        await asyncio.gather(*(exchange.ask(app, JSON) for exchange in exchanges))
        return exchanges

    exchanges = asyncio.run(together())
    after = counted(app, "dss_executions_total", model="tiny", version="1")
    assert after - before <= 2  # the first may be computed before the others are seen
    for exchange, single in zip(exchanges, singles, strict=True):
        assert exchange.status == 200
        found, expected = orjson.loads(exchange.body), orjson.loads(single.body)
        assert found["classes"] == expected["classes"]
        np.testing.assert_allclose(found["log_probs"], expected["log_probs"], atol=1e-6)


class Remembering(FakeEngine):
    """Knows whether its last answer is still in memory."""

    def topk(
        self, hidden: NDArray[np.float32], k: int, experts: int = 1, mode: Mode = SPARSE
    ) -> TopK:
        found = super().topk(hidden, k, experts, mode)
        self.last = weakref.ref(found.classes)
        return found


@pytest.mark.parametrize("inline_seconds", [0.0, 10.0])
def test_what_an_answer_was_made_of_is_gone_while_its_client_reads(
    folder: Path, inline_seconds: float
) -> None:
    engine = Remembering(hidden_size=WIDTH)
    remembered = []

    class Reading(Exchange):
        async def send(self, message: Message) -> None:
            if message["type"] == "http.response.body":
                deadline = monotonic() + 10  # the engine's thread may not have gone on yet
                while engine.last() is not None and monotonic() < deadline:
                    await asyncio.sleep(0.001)
                remembered.append(engine.last())
            await super().send(message)

    settings = Settings(models=folder, queue=Queue(inline_seconds=inline_seconds))
    with loaded(settings, engine) as app:
        reading = Reading(chunk(BODY))
        asyncio.run(reading.ask(app, JSON))
    assert (reading.status, remembered) == (200, [None])


def test_a_new_catalog_is_seen_at_once(folder: Path) -> None:
    with loaded(Settings(models=folder)) as app:
        assert answer(app, JSON, chunk(BODY)).headers[b"dss-model-version"] == b"1"
        write_tiny(folder / "tiny" / "2", seed=2)
        old = app.state.service.repository.catalog
        app.state.service.manager.load()
        assert answer(app, JSON, chunk(BODY)).headers[b"dss-model-version"] == b"2"
        for model in old.models():
            asyncio.run(model.batcher.close())


def test_what_clients_make_up_is_not_kept_without_end(app: Application) -> None:
    for number in range(2 * native.FORMATS_KEPT):
        headers = [(b"content-type", b"application/json; x=%d" % number)]
        assert answer(app, headers, chunk(BODY)).status == 200
    assert len(app.handlers["native"]._formats) <= native.FORMATS_KEPT
    assert len(app.handlers["native"]._targets) == 1


# --- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "body", "status", "detail"),
    [
        (JSON, b'{"inputs": [[1, 2, 1e39, 4]]}', 422, "inputs[0][2] is too large for float32."),
        (
            NPY,
            npy_bytes(np.array([[1, 2, 3, 4], [1, np.inf, 3, 4]], np.float32)),
            422,
            "inputs[1][1] is a NaN or an infinity.",
        ),
        (
            JSON,
            b'{"inputs": [[1, 2]]}',
            422,
            "Inputs have shape [1, 2]; [rows, 4] is expected.",
        ),
    ],
)
def test_the_engine_s_refusals_are_said_precisely(
    app: Application, headers: Headers, body: bytes, status: int, detail: str
) -> None:
    for _ in range(3):  # by the engine's thread, and then at once
        exchange = answer(app, headers, chunk(body))
        assert (exchange.status, orjson.loads(exchange.body)["detail"]) == (status, detail)


def test_an_unnamed_failure_is_a_plain_500_and_logged(
    app: Application, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*_: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr("service.http.inference.handler.check_limits", explode)
    exchange = answer(app, JSON, chunk(BODY))
    assert (exchange.status, exchange.problem) == (500, "about:blank")
    assert b"secret" not in exchange.body
    assert "POST /topk failed." in caplog.text
    assert "a secret" in caplog.text
    labels = {"route": "/topk", "method": "POST", "status": "500"}
    assert counted(app, "dss_http_requests_total", **labels) == 1


def test_an_engine_that_fails_at_once_is_500_and_heals(folder: Path) -> None:
    """Like test_api's, but when the event loop itself computes."""
    engine = FakeEngine(hidden_size=WIDTH)
    with loaded(Settings(models=folder), engine) as app:

        async def scenario() -> list[int]:
            statuses = []
            for failure in (None, None, RuntimeError("broken"), None):
                engine.failure = failure
                exchange = Exchange(chunk(BODY))
                await exchange.ask(app, JSON)
                statuses.append(exchange.status)
                await asyncio.sleep(0)
            return statuses

        assert asyncio.run(scenario()) == [200, 200, 500, 200]
        assert app.state.service.repository.get().batcher.alive
