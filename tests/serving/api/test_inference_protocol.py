"""Requests whose head the server knows: real sockets, since packets are what it is about."""

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import orjson
import pytest
from helpers.fake_engine import FakeEngine
from helpers.raw_http import Connection, request
from helpers.server import in_thread, wait_until
from helpers.tiny_bundle import WIDTH, write_tiny

from service.batching.batcher import Batcher
from service.http.app import Application, create_app
from service.http.inference.connection.fast_answers import FastConnection
from service.http.inference.connection.head_cache import HEADS_KEPT
from service.settings import EngineSettings, Limits, Queue, Settings

ROUTE = {"route": "/topk", "method": "POST"}


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine(hidden_size=WIDTH)


@pytest.fixture
def app(tmp_path: Path, fake: FakeEngine) -> Application:
    write_tiny(tmp_path / "tiny" / "1", labels=False)
    settings = Settings(
        models=tmp_path,
        limits=Limits(max_body_bytes=4096, max_rows=4),
        queue=Queue(max_rows=4),
        engine=EngineSettings(stuck_seconds=60),
    )
    return create_app(settings, engine_factory=lambda *_: fake)


@contextmanager
def started(app: Application, keep_alive: int = 75) -> Iterator[int]:
    """The port of a server that is ready."""
    with in_thread(app, timeout_keep_alive=keep_alive) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200)
        yield client.base_url.port or 0


@pytest.fixture
def port(app: Application, fake: FakeEngine) -> Iterator[int]:
    with started(app) as number:
        yield number
        fake.release.set()


def known(app: Application) -> int:
    return len(app.connection.heads)


def teach(app: Application, connection: Connection) -> None:
    """Ask until the head is known, and calls are known to be short."""
    for value in (1, 2):
        connection.send(request(value))
        assert connection.classes() == [[value]]
    assert known(app) == 1


def queued(app: Application) -> int:
    batcher: Batcher = app.state.service.repository.get().batcher
    return batcher.queued_rows


def counted(app: Application, status: int) -> float:
    registry = app.state.service.metrics.registry
    labels = ROUTE | {"status": str(status)}
    return registry.get_sample_value("dss_http_requests_total", labels) or 0.0


def test_a_known_head_is_answered_as_an_unknown_one(app: Application, port: int) -> None:
    with Connection(port) as connection:
        found = []
        for _ in range(4):
            connection.send(request(7))
            found.append(connection.answer())
    assert known(app) == 1
    for status, headers, body in found:
        assert (status, body) == (200, found[0][2])
        own = {"date": "", "x-request-id": ""}
        assert headers | own == found[0][1] | own
    assert len({headers["x-request-id"] for _, headers, _ in found}) == 4
    assert counted(app, 200) == 4
    assert set(found[0][1]) - {"date", "server"} == {
        "content-type", "content-length", "dss-model", "dss-model-version", "x-request-id",
    }  # fmt: skip


def test_lines_that_name_a_request_do_not_make_a_head_new(app: Application, port: int) -> None:
    with Connection(port) as connection:
        for number in range(5):
            name = "X-Request-ID" if number % 2 else "x-request-id"
            trace = f"traceparent: 00-{number:032x}-{1:016x}-01\r\n"
            connection.send(request(7, more=f"{name}: mine-{number}\r\n{trace}"))
            status, headers, _ = connection.answer()
            assert (status, headers["x-request-id"]) == (200, f"mine-{number}")
            assert known(app) == 1
        connection.send(request(7))
        assert connection.answer()[1]["x-request-id"] not in ("", "mine-4")
    assert known(app) == 1


def test_other_connections_know_the_head_too(app: Application, port: int) -> None:
    with Connection(port) as first:
        teach(app, first)
    with Connection(port) as second:
        for value in (8, 9):
            second.send(request(value))
            assert second.classes() == [[value]]


@pytest.mark.parametrize("cut", [5, 60, -20, -1])
def test_a_request_in_two_packets_is_answered(app: Application, port: int, cut: int) -> None:
    with Connection(port) as connection:
        teach(app, connection)
        for value in (4, 5):
            connection.send(request(value)[:cut])
            connection.send(request(value)[cut:])
            assert connection.classes() == [[value]]


def test_a_head_is_learned_without_its_body(app: Application, port: int) -> None:
    """Many clients send head and body one after the other."""
    head, _, body = request(4).partition(b"\r\n\r\n")
    with Connection(port) as connection:
        for value in range(4):
            connection.send(head + b"\r\n\r\n")
            wait_until(lambda: any(made._in_message or made._piece for made in connections(app)))
            connection.send(body)
            assert connection.classes() == [[4]], value
            assert known(app) == 1


def test_the_second_of_two_heads_is_not_taken_for_the_first(app: Application, port: int) -> None:
    other = request(2, more="X: y\r\n")
    with Connection(port) as connection:
        connection.send(request(1) + other)
        assert [connection.classes(), connection.classes()] == [[[1]], [[2]]]
        assert known(app) == 2
        connection.send(other + request(1))
        assert [connection.classes(), connection.classes()] == [[[2]], [[1]]]


def test_a_body_that_comes_late_is_waited_for_by_uvicorn(
    app: Application, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.http.inference.connection.fast_answers.PIECE_SECONDS", 0.01)
    with Connection(port) as connection:
        teach(app, connection)
        connection.send(request(3)[:-5])
        wait_until(lambda: any(made._in_message for made in connections(app)))
        connection.send(request(3)[-5:])
        assert connection.classes() == [[3]]


def test_a_body_that_trickles_is_waited_for_by_uvicorn(app: Application, port: int) -> None:
    with Connection(port) as connection:
        teach(app, connection)
        connection.send(request(3)[:-5])
        wait_until(lambda: any(made._piece for made in connections(app)))
        connection.send(request(3)[-5:-4])
        wait_until(lambda: any(made._in_message for made in connections(app)))
        connection.send(request(3)[-4:])
        assert connection.classes() == [[3]]


def test_stopping_waits_for_the_rest_of_a_request(app: Application) -> None:
    with ExitStack() as stack:
        with started(app) as port:
            connection = stack.enter_context(Connection(port))
            teach(app, connection)
            connection.send(request(3)[:-5])
            wait_until(lambda: any(made._piece for made in connections(app)))
            (made,) = (made for made in connections(app) if made._piece)

            def finish_once_told_to_stop() -> None:
                wait_until(lambda: made._in_message)
                connection.send(request(3)[-5:])

            finishing = threading.Thread(target=finish_once_told_to_stop)
            finishing.start()
        finishing.join()
        assert connection.classes() == [[3]]
        assert connection.ended()


def test_pipelined_requests_are_answered_in_order(app: Application, port: int) -> None:
    with Connection(port) as connection:
        teach(app, connection)
        connection.send(b"".join(request(value) for value in range(20)))
        assert [connection.classes() for _ in range(20)] == [[[value]] for value in range(20)]
        for value in range(20):
            connection.send(request(value))
        assert [connection.classes() for _ in range(20)] == [[[value]] for value in range(20)]


def occupy(fake: FakeEngine, connection: Connection) -> None:
    """Make the engine's thread busy with an unknown kind of call, so that others must wait."""
    fake.hold()
    connection.send(request(0, b'{"inputs": [[600, 0, 0, 0]], "k": 2}'))
    assert fake.entered.wait(30)


def test_what_comes_while_an_answer_is_pending_waits_its_turn(
    app: Application, port: int, fake: FakeEngine
) -> None:
    with Connection(port) as other, Connection(port) as connection:
        teach(app, connection)
        occupy(fake, other)
        connection.send(request(1))
        wait_until(lambda: queued(app) == 1)
        connection.send(request(2) + request(3)[:30])
        connection.send(request(3)[30:])
        fake.release.set()
        assert [connection.classes() for _ in range(3)] == [[[1]], [[2]], [[3]]]
        assert other.classes() == [[600, 601]]


def test_a_client_that_leaves_is_not_computed_for(
    app: Application, port: int, fake: FakeEngine
) -> None:
    with Connection(port) as other:
        with Connection(port) as connection:
            teach(app, connection)
            calls = len(fake.calls)
            occupy(fake, other)
            connection.send(request(1))
            wait_until(lambda: queued(app) == 1)
        wait_until(lambda: queued(app) == 0)  # taken out while the engine is still busy
        fake.release.set()
        assert other.classes() == [[600, 601]]
        wait_until(lambda: queued(app) == 0)
    assert fake.calls[calls:] == [(1, 2, 1)]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"inputs": [["1", 0, 0, 0]], "k": 1}', 422),
        (b'{"inputs": [[1111, 0, 0, 0], "k": 1}', 400),
        (b'{"inputs": [[1, 0, 0, 0]], "k": 999}', 422),
    ],
)
def test_a_bad_body_under_a_known_head_is_a_problem_and_is_counted_once(
    app: Application, port: int, body: bytes, status: int
) -> None:
    with Connection(port) as connection:
        teach(app, connection)
        connection.send(request(0, body))
        found, headers, content = connection.answer()
        assert (found, headers["content-type"]) == (status, "application/problem+json")
        assert orjson.loads(content)["instance"] == "/topk"
        assert counted(app, status) == 1
        connection.send(request(5))
        assert connection.classes() == [[5]]


def test_an_engine_that_fails_a_known_request_is_500(
    app: Application, port: int, fake: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with Connection(port) as connection:
        teach(app, connection)
        fake.failure = RuntimeError("broken")
        connection.send(request(1))
        assert connection.answer()[0] == 500
        fake.failure = None
        connection.send(request(2))
        assert connection.classes() == [[2]]
    assert "broken" in caplog.text


def test_an_engine_that_fails_a_pending_request_is_500(
    app: Application, port: int, fake: FakeEngine
) -> None:
    with Connection(port) as other, Connection(port) as connection:
        teach(app, connection)
        occupy(fake, other)
        connection.send(request(1))
        wait_until(lambda: queued(app) == 1)
        fake.failure = RuntimeError("broken")
        fake.release.set()
        assert connection.answer()[0] == other.answer()[0] == 500


def test_a_full_queue_is_429_under_a_known_head(
    app: Application, port: int, fake: FakeEngine
) -> None:
    with Connection(port) as other, Connection(port) as waiting, Connection(port) as connection:
        teach(app, connection)
        occupy(fake, other)
        rows = [[1.0, 0, 0, 0]] * 4
        waiting.send(request(0, orjson.dumps({"inputs": rows, "k": 1})))
        wait_until(lambda: queued(app) == 4)
        connection.send(request(1))
        status, headers, _ = connection.answer()
        assert (status, headers["retry-after"]) == (429, "1")
        fake.release.set()
        assert waiting.answer()[0] == other.answer()[0] == 200


def test_stopping_answers_what_is_pending_first(app: Application, fake: FakeEngine) -> None:
    with ExitStack() as stack:
        with started(app) as port:
            connection, other = (stack.enter_context(Connection(port)) for _ in range(2))
            teach(app, connection)
            occupy(fake, other)
            connection.send(request(3))
            wait_until(lambda: queued(app) == 1)
            pending = [made for made in connections(app) if made._pending is not None]
            assert len(pending) == 2

            def release_once_told_to_stop() -> None:
                wait_until(lambda: all(made._closes for made in pending))
                fake.release.set()

            releasing = threading.Thread(target=release_once_told_to_stop)
            releasing.start()
        releasing.join()
        for told in (connection, other):
            status, headers, _ = told.answer()
            assert (status, headers["connection"]) == (200, "close")
            assert told.ended()


def connections(app: Application) -> list[FastConnection]:
    return [made for made in gc.get_objects() if type(made) is app.connection]


@pytest.mark.parametrize(
    "unusual",
    [
        request(1, more="Connection: close\r\n"),
        request(1, more="Expect: 100-continue\r\n"),
        request(1, version="1.0"),
        b"POST /topk HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n24\r\n" + request(1)[-36:] + b"\r\n0\r\n\r\n",
        request(1, more="X: " + "y" * 3000 + "\r\n"),
        request(1, b" " * 5000),
        b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
        b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_an_unusual_head_is_not_learned(app: Application, port: int, unusual: bytes) -> None:
    with Connection(port) as connection:
        connection.send(unusual)
        connection.read_packet()
    assert known(app) == 0
    with Connection(port) as connection:
        teach(app, connection)


def test_a_refused_head_is_not_learned(app: Application, port: int) -> None:
    with Connection(port) as connection:
        for _ in range(2):
            connection.send(request(1, more="Accept: text/html\r\n"))
            assert connection.answer()[0] == 406
    assert known(app) == 0


def test_what_clients_make_up_is_not_kept_without_end(app: Application, port: int) -> None:
    with Connection(port) as connection:
        for number in range(HEADS_KEPT + 10):
            connection.send(request(1, more=f"X: {number}\r\n"))
            assert connection.classes() == [[1]]
    assert 0 < known(app) <= HEADS_KEPT


def test_an_idle_connection_is_closed(app: Application) -> None:
    with started(app, keep_alive=1) as port, Connection(port) as connection:
        teach(app, connection)
        assert connection.ended()


def test_v2_heads_are_known_too(app: Application, port: int) -> None:
    row = [[5.0, 0, 0, 0]]
    tensor = {"name": "hidden", "shape": [1, WIDTH], "datatype": "FP32", "data": row}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        found = [
            client.post("/v2/models/tiny/infer", json={"inputs": [tensor]}).json() for _ in range(3)
        ]
    assert known(app) == 1
    assert found[0] == found[1] == found[2]
    assert found[0]["outputs"][0]["data"][0] == 5
