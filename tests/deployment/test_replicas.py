"""Several replicas behind the proxy of deploy/compose, and Prometheus that finds them."""

import http.client
import http.server
import json
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.deployment.dns_server import named
from helpers.deployment.haproxy import ADDRESSES, Proxied, needs_haproxy, proxy, replicated
from helpers.deployment.prometheus import FILE, at_ports, needs_prometheus, needs_root
from helpers.server import Running, free_port, wait_until
from helpers.tiny_bundle import rows_for
from prometheus_client.parser import text_string_to_metric_families

from service.bench import server

TOPK = {"inputs": rows_for(0, 1).tolist(), "k": 2}
TOO_LONG = b" " * 200_000 + json.dumps(TOPK).encode()  # to arrive at once, and so counted
JSON = {"content-type": "application/json"}
Json = dict[str, Any]
Watch = Iterator[Callable[[], dict[str, set[str]]]]
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def pair(
    models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Proxied, list[Running]]]:
    settings = {
        "DSS_ACCESS_LOG": "1",
        "DSS_LOG_FORMAT": "json",
        "DSS_LIMITS__MAX_PENDING_BYTES": str(len(TOO_LONG) // 2),
    }
    with replicated(models, tmp_path_factory.mktemp("pair"), 2, **settings) as made:
        yield made


def answers(replica: Running, **labels: str) -> float:
    text = httpx.get(replica.url + "/metrics").text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "dss_http_requests_total" and labels.items() <= sample.labels.items()
    )


@dataclass
class Load:
    """Clients with a connection each, which ask without a pause and go on after a failure."""

    port: int
    statuses: Counter[int] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)  # connections that ended without an answer
    ended: threading.Event = field(default_factory=threading.Event)

    CLIENTS = 4

    @property
    def failed(self) -> int:
        return self.statuses.total() - self.statuses[200] + len(self.lost)

    def flows(self, requests: int = 100) -> None:
        enough = self.statuses[200] + requests
        wait_until(lambda: self.statuses[200] >= enough)

    def ask(self) -> None:
        body = json.dumps(TOPK)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        while not self.ended.is_set():
            try:
                connection.request("POST", "/topk", body, JSON)
                answer = connection.getresponse()
                answer.read()
                self.statuses[answer.status] += 1
            except (OSError, http.client.HTTPException) as error:
                self.lost.append(repr(error))
                connection.close()
        connection.close()


@contextmanager
def load(port: int) -> Iterator[Load]:
    made = Load(port)
    clients = [threading.Thread(target=made.ask) for _ in range(Load.CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield made
    finally:
        made.ended.set()
        for client in clients:
            client.join()


@needs_haproxy
def test_both_replicas_answer(pair: tuple[Proxied, list[Running]]) -> None:
    proxied, replicas = pair
    for _ in range(10):
        assert httpx.post(proxied.url + "/topk", json=TOPK).status_code == 200
    counts = [answers(replica, route="/topk", status="200") for replica in replicas]
    assert all(counts), counts


@needs_haproxy
def test_a_request_keeps_its_names(pair: tuple[Proxied, list[Running]]) -> None:
    proxied, replicas = pair
    headers = {"X-Request-Id": "through-the-proxy", "traceparent": TRACE}
    answer = httpx.post(proxied.url + "/topk", json=TOPK, headers=headers)
    assert answer.headers["X-Request-Id"] == "through-the-proxy"

    def logged() -> list[dict[str, Any]]:
        lines = [line for replica in replicas for line in replica.log.read_text().splitlines()]
        return [json.loads(line) for line in lines if "through-the-proxy" in line]

    wait_until(lambda: bool(logged()))
    (line,) = logged()
    assert TRACE.split("-")[1] in json.dumps(line)


@needs_haproxy
def test_nothing_of_one_replica_or_of_the_proxy_is_shown(
    pair: tuple[Proxied, list[Running]],
) -> None:
    proxied, _ = pair
    for path in "/metrics", "/haproxy?stats", "/stats", "/healthz":
        answer = httpx.get(proxied.url + path)
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/problem+json"
    internal = f"http://127.0.0.1:{proxied.metrics_port}"
    assert httpx.get(internal + "/healthz").status_code == 200
    assert httpx.get(internal + "/haproxy?stats").status_code == 503


@needs_haproxy
def test_a_replica_may_stop_or_die_under_load(models: Path, tmp_path: Path) -> None:
    """One drains and no request fails; another one is killed, and what it had in hand may."""
    with (
        replicated(models, tmp_path, 3) as (proxied, (stopped, killed, _)),
        load(proxied.port) as clients,
    ):
        clients.flows()
        stopped.process.send_signal(signal.SIGTERM)
        assert stopped.process.wait(30) == 0
        clients.flows()
        assert clients.failed == 0, (clients.statuses, clients.lost)

        before = answers(killed, route="/topk")
        clients.flows()
        assert answers(killed, route="/topk") > before, "it was not under load"
        killed.process.kill()
        wait_until(lambda: proxied.up() == 1)
        in_hand = clients.failed
        assert in_hand <= Load.CLIENTS, (clients.statuses, clients.lost)
        clients.flows()
        assert clients.failed == in_hand, (clients.statuses, clients.lost)


@needs_haproxy
def test_a_refusal_for_overload_is_passed_on_and_not_repeated(
    pair: tuple[Proxied, list[Running]],
) -> None:
    proxied, replicas = pair
    for _ in range(5):
        answer = httpx.post(proxied.url + "/topk", content=TOO_LONG, headers=JSON)
        assert answer.status_code == 429
        assert answer.headers["Retry-After"] == "1"
    assert sum(answers(replica, status="429") for replica in replicas) == 5
    retried = proxied.samples("haproxy_server_retry_warnings_total")
    assert retried and not any(retried.values()), retried


class Misbehaving(http.server.ThreadingHTTPServer):
    """Ready by its own word; a POST gets `status`, or no answer at all."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], status: int | None) -> None:
        super().__init__(address, _Handler)
        self.status = status
        self.asked: list[str] = []

    def handle_error(self, *_: object) -> None:
        """The proxy cuts the connections of its checks."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Misbehaving
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(self.path)
        if self.server.status is None:
            self.close_connection = True
        else:
            self._answer(self.server.status)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@needs_haproxy
@pytest.mark.parametrize(
    ("status", "topk", "change"),
    [
        (503, {200}, {503, 200}),  # it says that it did nothing, so another one is asked
        (None, {200}, {502, 200}),  # a query may be repeated, a change may have been made
        (500, {200, 500}, {500, 200}),
        (429, {200, 429}, {429, 200}),
    ],
)
def test_who_is_asked_again(
    tmp_path: Path, status: int | None, topk: set[int], change: set[int]
) -> None:
    port = free_port()
    bad = Misbehaving((ADDRESSES[0], port), status)
    good = Misbehaving((ADDRESSES[1], port), 200)
    threads = [threading.Thread(target=one.serve_forever) for one in (bad, good)]
    for thread in threads:
        thread.start()
    try:
        with (
            named({"service": ADDRESSES[:2]}, "127.0.0.1") as name_server,
            proxy(tmp_path, port, name_server, expected=2) as proxied,
        ):
            for paths, expected in (
                (("/topk", "/models/a/topk", "/v2/models/a/infer"), topk),
                (("/v2/repository/models/a/load", "/topk/else"), change),
            ):
                for path in paths:
                    seen = {httpx.post(proxied.url + path, json=TOPK).status_code for _ in range(6)}
                    assert seen == expected, path
                    assert path in bad.asked
    finally:
        for one, thread in zip((bad, good), threads, strict=True):
            one.shutdown()
            thread.join()
            one.server_close()


@needs_haproxy
def test_without_replicas_the_proxy_says_so(tmp_path: Path) -> None:
    with (
        named({}, "127.0.0.1") as name_server,
        proxy(tmp_path, free_port(), name_server, expected=0) as proxied,
    ):
        answer = httpx.post(proxied.url + "/topk", json=TOPK)
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["Retry-After"] == "1"
        assert answer.json()["status"] == 503
        assert httpx.get(f"http://127.0.0.1:{proxied.metrics_port}/healthz").status_code == 503


# --- who is watched ----------------------------------------------------------------------------


@contextmanager
def watched(folder: Path, config: Json, names: dict[str, tuple[str, ...]], address: str) -> Watch:
    """Prometheus asks the servers of /etc/resolv.conf, and so is given one of its own.

    Yields what says which instances of which job are up.
    """
    folder.mkdir()
    (folder / "prometheus.yml").write_text(json.dumps(config))
    shutil.copy(FILE.parent / "rules.yml", folder)
    (folder / "resolv.conf").write_text(f"nameserver {address}\noptions ndots:0\n")
    port = free_port()
    script = 'mount --bind resolv.conf /etc/resolv.conf && exec prometheus "$@"'
    arguments = ["--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    arguments += [f"--web.listen-address=127.0.0.1:{port}"]

    def up() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        with suppress(httpx.TransportError):
            url = f"http://127.0.0.1:{port}/api/v1/query"
            answer = httpx.get(url, params={"query": "up == 1"})
            for series in answer.json()["data"]["result"] if answer.status_code == 200 else ():
                found.setdefault(series["metric"]["job"], set()).add(series["metric"]["instance"])
        return found

    command = ["unshare", "--mount", "sh", "-c", script, "sh", *arguments]
    with (
        named(names, address, 53),
        server.running(command, folder / "log", folder=folder, stop_signal=signal.SIGKILL),
    ):
        yield up


@needs_haproxy
@needs_prometheus
@needs_root
def test_prometheus_finds_each_replica_by_name_and_the_proxy_if_there_is_one(
    pair: tuple[Proxied, list[Running]], tmp_path: Path
) -> None:
    proxied, replicas = pair
    port = replicas[0].port
    config = at_ports({"service": port, "proxy": proxied.metrics_port})
    names = {"service": ADDRESSES[:2]}
    expected = {"doubly-sparse-softmax": {f"{address}:{port}" for address in ADDRESSES[:2]}}
    one = {"proxy": ("127.0.0.1",)}
    with (
        watched(tmp_path / "without", config, names, "127.0.0.53") as without,
        watched(tmp_path / "with", config, {**names, **one}, "127.0.0.54") as with_proxy,
    ):
        wait_until(lambda: without() == expected)
        expected["proxy"] = {f"127.0.0.1:{proxied.metrics_port}"}
        wait_until(lambda: with_proxy() == expected)
