"""What is refused, and how soon: overload, deadlines, and clients that ask or take too much."""

import gc
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import orjson
import pytest
from helpers.fake_engine import FakeEngine
from helpers.raw_http import Connection, request
from helpers.server import in_thread, wait_until
from helpers.tiny_bundle import WIDTH, write_tiny

from service.batching.queue import BatchKey
from service.bench.http_reader import ConnectionEnded
from service.http.app import Application, create_app
from service.settings import EngineSettings, Limits, Queue, Settings

Start = Callable[..., int]


@pytest.fixture
def fake() -> Iterator[FakeEngine]:
    engine = FakeEngine(hidden_size=WIDTH)
    yield engine
    engine.release.set()


class Started:
    """A server with limits of a test's choice."""

    def __init__(self, app: Application, port: int) -> None:
        self.app = app
        self.port = port

    @property
    def queued(self) -> int:
        return int(self.app.state.service.repository.get().batcher.queued_rows)

    @property
    def connections(self) -> int:
        """But for those of probes."""
        return len([made for made in gc.get_objects() if type(made) is self.app.connection])

    def rejected(self, reason: str) -> float:
        registry = self.app.state.service.metrics.registry
        labels = {"model": "tiny", "reason": reason}
        return float(registry.get_sample_value("dss_rejected_requests_total", labels) or 0.0)


@contextmanager
def started(
    folder: Path, fake: FakeEngine, keep_alive: int = 75, **settings: Any
) -> Iterator[Started]:
    write_tiny(folder / "tiny" / "1", labels=False)
    made = Settings(models=folder, engine=EngineSettings(stuck_seconds=60), **settings)
    app = create_app(made, engine_factory=lambda *_: fake)
    with in_thread(app, timeout_keep_alive=keep_alive) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200)
        try:
            yield Started(app, client.base_url.port or 0)
        finally:
            fake.release.set()


def occupy(fake: FakeEngine, connection: Connection) -> None:
    fake.hold()
    connection.send(request(0, b'{"inputs": [[600, 0, 0, 0]], "k": 2}'))
    assert fake.entered.wait(30)


# --- overload --------------------------------------------------------------------------------


def test_what_would_wait_too_long_is_429_although_few_rows_wait(
    tmp_path: Path, fake: FakeEngine
) -> None:
    with (
        started(tmp_path, fake, queue=Queue(max_seconds=0.5, max_batch_seconds=2.0)) as server,
        Connection(server.port) as first,
        Connection(server.port) as second,
        Connection(server.port) as third,
    ):
        batcher = server.app.state.service.repository.get().batcher
        occupy(fake, first)
        batcher._cost.learn(BatchKey(1, 1), 1, 1.0)  # a second for a row
        second.send(request(1))
        wait_until(lambda: server.queued == 1)
        third.send(request(2))
        status, headers, body = third.answer()
        assert (status, headers["retry-after"]) == (429, "1")
        assert orjson.loads(body)["type"] == "urn:dss:problem:queue-full"
        assert server.rejected("queue_full") == 1
        fake.release.set()
        assert (first.answer()[0], second.answer()[0]) == (200, 200)


def test_a_full_queue_refuses_before_the_body_has_come(tmp_path: Path, fake: FakeEngine) -> None:
    with (
        started(tmp_path, fake, limits=Limits(max_rows=1), queue=Queue(max_rows=1)) as server,
        Connection(server.port) as first,
        Connection(server.port) as second,
        Connection(server.port) as third,
    ):
        occupy(fake, first)
        second.send(request(1))
        wait_until(lambda: server.queued == 1)
        third.send(request(2)[:-20])
        status, headers, _ = third.answer()
        assert (status, headers["retry-after"], headers["connection"]) == (429, "1", "close")
        fake.release.set()
        assert (first.answer()[0], second.answer()[0]) == (200, 200)


def test_bodies_on_their_way_are_bounded_together(tmp_path: Path, fake: FakeEngine) -> None:
    limits = Limits(max_pending_bytes=300_000)
    rows = b",".join([b"[1.%b, 0, 0, 0]" % (b"0" * 40)] * 4000)
    body = b'{"inputs": [%b], "k": 1}' % rows
    assert 200_000 < len(body) < 250_000
    whole = request(1, body)
    with (
        started(tmp_path, fake, limits=limits) as server,
        Connection(server.port) as first,
        Connection(server.port) as second,
    ):
        budget = server.app.state.service.budget
        first.send(whole[:-10])
        wait_until(lambda: budget.taken > 100_000)
        second.send(whole[:-10])
        status, headers, answer = second.answer()
        assert (status, headers["retry-after"]) == (429, "1")
        assert orjson.loads(answer)["type"] == "urn:dss:problem:too-many-bytes"
        first.send(whole[-10:])
        assert first.classes() == [[1]] * 4000
        wait_until(lambda: budget.taken == 0)


def test_answers_that_nobody_reads_count_and_end(tmp_path: Path, fake: FakeEngine) -> None:
    fake.n_reachable = 10**6
    limits = Limits(max_k=10**6, max_pending_bytes=2**20, read_seconds=1.5)
    ask = request(1, b'{"inputs": [[1, 0, 0, 0]], "k": 1000000}')  # some 16 MB
    with (
        started(tmp_path, fake, limits=limits) as server,
        Connection(server.port) as lazy,
        Connection(server.port) as other,
    ):
        budget = server.app.state.service.budget
        lazy.send(ask)
        wait_until(lambda: budget.taken > 2**20)
        other.send(request(1))
        assert other.answer()[0] == 429
        wait_until(lambda: budget.taken == 0)  # the lazy one was cut off
        other.send(request(1))
        assert other.classes() == [[1]]
        with pytest.raises(ConnectionEnded):
            lazy.answer()


def test_there_are_no_more_connections_than_allowed(tmp_path: Path, fake: FakeEngine) -> None:
    with started(tmp_path, fake, limits=Limits(max_connections=3)) as server, ExitStack() as stack:
        opened = []
        for _ in range(2):  # beside that of the probe
            opened.append(stack.enter_context(Connection(server.port)))
            opened[-1].send(request(1))
            assert opened[-1].classes() == [[1]]
        excess = stack.enter_context(Connection(server.port))
        assert excess.answer()[0] == 503
        assert excess.ended()
        opened.pop().__exit__()

        def has_room() -> bool:
            with Connection(server.port) as another:
                another.send(request(2))
                return another.answer()[0] == 200

        wait_until(has_room)


# --- deadlines -------------------------------------------------------------------------------


def test_a_late_answer_is_504_and_is_not_computed(tmp_path: Path, fake: FakeEngine) -> None:
    with (
        started(tmp_path, fake) as server,
        Connection(server.port) as first,
        Connection(server.port) as second,
    ):
        second.send(request(1, more="DSS-Timeout: 0.05\r\n"))
        assert second.classes() == [[1]]
        occupy(fake, first)
        calls = len(fake.calls)
        second.send(request(2, more="DSS-Timeout: 0.05\r\n"))
        before = monotonic()
        status, _, body = second.answer()
        assert monotonic() - before < 5
        assert status == 504
        assert orjson.loads(body)["type"] == "urn:dss:problem:deadline-exceeded"
        assert server.rejected("deadline_exceeded") == 1
        fake.release.set()
        assert first.answer()[0] == 200
        assert len(fake.calls) == calls


def test_the_servers_own_deadline_holds_without_a_header(tmp_path: Path, fake: FakeEngine) -> None:
    limits = Limits(request_seconds=0.05)
    with started(tmp_path, fake, limits=limits) as server, Connection(server.port) as connection:
        fake.hold()
        for more in ("", "DSS-Timeout: 60\r\n"):  # which cannot prolong it
            connection.send(request(1, more=more))
            assert connection.answer()[0] == 504


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_deadline_that_is_none_is_422(tmp_path: Path, fake: FakeEngine, seconds: str) -> None:
    with started(tmp_path, fake) as server, Connection(server.port) as connection:
        connection.send(request(1, more=f"DSS-Timeout: {seconds}\r\n"))
        status, _, body = connection.answer()
        assert (status, orjson.loads(body)["detail"]) == (
            422,
            "DSS-Timeout must be a positive number of seconds.",
        )


def test_a_client_that_leaves_an_unknown_head_is_not_computed_for(
    tmp_path: Path, fake: FakeEngine
) -> None:
    with started(tmp_path, fake) as server, Connection(server.port) as first:
        occupy(fake, first)
        with Connection(server.port) as second:
            second.send(request(1, more="X-New: 1\r\n"))
            wait_until(lambda: server.queued == 1)
        wait_until(lambda: server.queued == 0)
        calls = len(fake.calls)
        fake.release.set()
        assert first.answer()[0] == 200
        assert len(fake.calls) == calls


# --- heads, and slow clients -----------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        "".join(f"X-{number}: y\r\n" for number in range(200)),
        "X: " + "y" * 5000 + "\r\n",
        "".join(f"X-{number}: {'y' * 900}\r\n" for number in range(10)),
    ],
    ids=["headers", "bytes of one", "bytes of all"],
)
def test_a_large_head_is_431(tmp_path: Path, fake: FakeEngine, more: str) -> None:
    limits = Limits(max_headers=100, max_head_bytes=4096)
    with started(tmp_path, fake, limits=limits) as server:
        with Connection(server.port) as connection:
            connection.send(request(1, more=more))
            status, headers, body = connection.answer()
            assert (status, headers["connection"]) == (431, "close")
            assert orjson.loads(body)["status"] == 431
        with Connection(server.port) as connection:
            connection.send(request(1))
            assert connection.classes() == [[1]]


def test_a_head_without_end_is_431(tmp_path: Path, fake: FakeEngine) -> None:
    with (
        started(tmp_path, fake, limits=Limits(max_head_bytes=20_000)) as server,
        Connection(server.port) as connection,
    ):
        connection.send(b"POST /topk HTTP/1.1\r\nX: ")

        def endless() -> None:
            with pytest.raises(OSError):
                while True:
                    connection.send(b"y" * 1000)

        sending = threading.Thread(target=endless)
        sending.start()
        assert connection.answer()[0] == 431
        sending.join()


def test_what_is_no_http_is_400(tmp_path: Path, fake: FakeEngine) -> None:
    with started(tmp_path, fake) as server, Connection(server.port) as connection:
        connection.send(b"nonsense\r\n\r\n")
        status, headers, _ = connection.answer()
        assert (status, headers["content-type"]) == (400, "application/problem+json")
        assert connection.ended()


def test_a_head_that_trickles_is_408(tmp_path: Path, fake: FakeEngine) -> None:
    limits = Limits(head_seconds=0.3)
    with started(tmp_path, fake, limits=limits) as server, Connection(server.port) as connection:
        connection.send(b"POST /topk HTTP/1.1\r\nHost: x\r\n")
        assert connection.answer()[0] == 408
        assert connection.ended()


def test_a_body_that_trickles_to_a_path_that_does_not_read_it_is_cut_off(
    tmp_path: Path, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.http.inference.connection.limits.LATE_SECONDS", 0.0)
    limits = Limits(head_seconds=0.2, body_seconds=0.2)
    with started(tmp_path, fake, limits=limits) as server, Connection(server.port) as connection:
        connection.send(b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc")
        assert connection.answer()[0] in (403, 405)
        with suppress(ConnectionError):
            assert connection.ended()


def test_a_connection_that_never_asks_is_closed(tmp_path: Path, fake: FakeEngine) -> None:
    with started(tmp_path, fake, keep_alive=1) as server, Connection(server.port) as connection:
        assert connection.ended()


def test_many_idle_connections_harm_nobody(tmp_path: Path, fake: FakeEngine) -> None:
    with started(tmp_path, fake) as server, ExitStack() as stack:
        for _ in range(200):
            idle = socket.create_connection(("127.0.0.1", server.port), timeout=30)
            stack.enter_context(idle)
        with Connection(server.port) as connection:
            connection.send(request(1))
            assert connection.classes() == [[1]]


# --- an engine that is stuck -----------------------------------------------------------------


def test_a_stuck_engine_fails_requests_and_readiness_within_a_second(
    tmp_path: Path, fake: FakeEngine
) -> None:
    write_tiny(tmp_path / "tiny" / "1", labels=False)
    app = create_app(Settings(models=tmp_path), engine_factory=lambda *_: fake)
    with in_thread(app) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200)
        fake.hold()
        with Connection(client.base_url.port or 0) as connection:
            connection.send(request(1, b'{"inputs": [[600, 0, 0, 0]], "k": 9}'))
            assert fake.entered.wait(30)
            stuck = monotonic()
            assert client.get("/livez").status_code == 200
            assert connection.answer()[0] == 500
            assert monotonic() - stuck < 2  # on a busy machine; on a quiet one 0.85
            assert client.get("/readyz").status_code == 503
            assert client.get("/livez").status_code == 200
            connection.send(request(2))
            assert connection.answer()[0] == 500  # at once: nothing waits for a broken engine
            fake.release.set()
            wait_until(lambda: client.get("/readyz").status_code == 200)
            connection.send(request(3))
            assert connection.classes() == [[3]]


def test_probes_need_no_key_and_v2_says_the_same(tmp_path: Path, fake: FakeEngine) -> None:
    with started(tmp_path, fake) as server:
        url = f"http://127.0.0.1:{server.port}"
        for path in ("/startupz", "/readyz", "/livez", "/v2/health/live", "/v2/health/ready"):
            assert httpx.get(url + path).status_code == 200
