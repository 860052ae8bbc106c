"""Faults of a group of workers: killed, stuck, without descriptors or disk space, stopped."""

import http.client
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from helpers.server import running, wait_until
from helpers.tiny_bundle import write_tiny
from helpers.worker_group import (
    TOPK,
    Group,
    alive,
    ask,
    children,
    cpu_ticks,
    descriptors,
    group,
    limit_descriptors,
)

from benchmarks.chaos.harness.server_process import client_ports

ROWS = len(TOPK["inputs"])
RECOVERY_SECONDS = 20.0  # 2 on a machine with time to spare
IDLE = 1000


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Three workers; each test leaves three."""
    models = tmp_path_factory.mktemp("models")
    write_tiny(models / "tiny" / "1")
    folder = tmp_path_factory.mktemp("three")
    with group(models, folder, workers=3, env={"DSS_STUCK_SECONDS": "5"}) as started:
        yield started


def whole(group: Group, without: int | None = None) -> bool:
    """Every worker is there and answers, and the process `without` is not among them."""
    workers = group.table.workers
    if len(workers) < 3 or without in workers.values():
        return False
    before = group.answered("/livez", "GET")
    for _ in workers:
        with suppress(httpx.TransportError):
            httpx.get(group.server.url + "/livez")
    now = group.answered("/livez", "GET")
    return all(now.get(number, 0) > before.get(number, 0) for number in workers)


# --- killed under load -----------------------------------------------------------------------


class Client(threading.Thread):
    """Asks on one connection after the other, and counts what became of it."""

    def __init__(self, port: int, ended: threading.Event) -> None:
        super().__init__()
        self._port = port
        self._ended = ended
        self.received = 0
        self.lost = 0  # asked, and the connection broke before there was an answer
        self.wrong: list[int] = []

    def run(self) -> None:
        body = json.dumps(TOPK)
        while not self._ended.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
            asked = False
            with suppress(OSError, http.client.HTTPException):
                while not self._ended.is_set():
                    asked = True
                    connection.request(
                        "POST", "/topk", body, headers={"content-type": "application/json"}
                    )
                    answer = connection.getresponse()
                    answer.read()
                    asked = False
                    if answer.status == 200:
                        self.received += 1
                    else:
                        self.wrong.append(answer.status)
            self.lost += asked
            connection.close()


def counted(group: Group) -> dict[str, float]:
    """Sums of what /metrics shows of `tiny` and its route."""
    found: dict[str, float] = {}
    for line in httpx.get(group.server.url + "/metrics", timeout=30).text.splitlines():
        name, _, rest = line.partition("{")
        labels, _, value = rest.rpartition(" ")
        if 'route="/topk"' not in labels and 'model="tiny"' not in labels:
            continue
        if 'status="' in labels and 'status="200"' not in labels:
            name = "not good"
        found[name] = found.get(name, 0.0) + float(value)
    return {"not good": 0.0, "dss_http_requests_total": 0.0, **found}


def test_sums_are_exact_when_workers_are_killed_under_load(three: Group) -> None:
    """Each answer that a client has is counted; besides these at most what was lost on the way.

    A call that a kill cuts short may be counted in one sum and not in the next, so what is said of
    two sums together holds but for the lost.
    """
    before = counted(three)
    ended = threading.Event()
    clients = [Client(three.server.port, ended) for _ in range(6)]
    for client in clients:
        client.start()
    last = 0.0
    try:
        for number in range(3):
            killed = three.table.workers[number]
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: three.table.workers.get(number) != killed)  # noqa: B023
            with suppress(httpx.TransportError):
                now = counted(three)["dss_http_requests_total"]
                assert now >= last, "a sum has fallen"
                last = now
            wait_until(lambda: whole(three, without=killed), RECOVERY_SECONDS)  # noqa: B023
    finally:
        ended.set()
        for client in clients:
            client.join()
    received = sum(client.received for client in clients)
    lost = sum(client.lost for client in clients)
    assert {status for client in clients for status in client.wrong} <= {429}
    assert received > 100
    assert 1 <= lost <= 2 * 3 * len(clients)

    after = counted(three)
    more = {name: after[name] - before.get(name, 0.0) for name in after}
    answers, requests = more["dss_http_requests_total"], more["dss_requests_total"]
    assert received <= answers <= requests <= received + lost
    assert more["dss_http_request_seconds_count"] == answers + more["not good"]
    for rows in more["dss_rows_total"], more["dss_expert_rows_total"]:
        assert ROWS * received <= rows <= ROWS * (received + lost)
    assert three.table.restarts == 3
    assert three.total() == sum(three.answered().values())


def test_a_stuck_worker_is_passed_over_and_then_replaced(three: Group) -> None:
    stuck = three.table.workers[1]
    os.kill(stuck, signal.SIGSTOP)

    def others_answer() -> bool:
        with suppress(httpx.TransportError):
            for _ in range(9):
                httpx.get(three.server.url + "/livez", timeout=1)
            return True
        return False

    wait_until(others_answer)
    assert alive(stuck), "it was passed over before it was killed"
    wait_until(lambda: not alive(stuck))
    wait_until(lambda: whole(three, without=stuck))
    assert "Worker 1 has been silent for 6 s and is killed." in three.server.log.read_text()


def test_workers_are_replaced_though_the_fork_server_died(three: Group) -> None:
    fork_server, killed = three.table.fork_server, three.table.workers[2]
    assert fork_server is not None
    os.kill(fork_server, signal.SIGKILL)
    wait_until(lambda: three.table.fork_server != fork_server)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: whole(three, without=killed))
    assert three.table.fork_server not in (None, fork_server)


# --- descriptors -----------------------------------------------------------------------------


def test_a_thousand_idle_connections_hinder_nobody(three: Group) -> None:
    workers = list(three.table.workers.values())

    def shares() -> list[int]:
        return [len(client_ports(worker, three.server.port)) for worker in workers]

    with ExitStack() as stack:
        for _ in range(IDLE):
            stack.enter_context(socket.create_connection(("127.0.0.1", three.server.port)))
        wait_until(lambda: sum(shares()) >= IDLE)
        ask(three, connections=6)
        assert max(shares()) - min(shares()) < IDLE / 10
    wait_until(lambda: sum(shares()) < 10)
    assert list(three.table.workers.values()) == workers


def status(connection: socket.socket) -> int | None:
    """Of an answer to a probe; nothing if the connection was closed instead."""
    with suppress(ConnectionError):
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
        said = connection.recv(1000)
        return int(said.split()[1]) if said else None
    return None


def test_a_worker_without_descriptors_closes_what_it_cannot_have(three: Group) -> None:
    workers = list(three.table.workers.values())
    for worker in workers:
        limit_descriptors(worker, descriptors(worker) + 4)
    try:
        with ExitStack() as stack:
            connections = [
                stack.enter_context(
                    socket.create_connection(("127.0.0.1", three.server.port), timeout=30)
                )
                for _ in range(60)
            ]
            found = [status(connection) for connection in connections]
        assert set(found) <= {200, 503, None}
        assert found.count(200) >= 3
        assert found.count(None) >= 20
    finally:
        for worker in workers:
            limit_descriptors(worker, 1000)
    wait_until(lambda: whole(three))
    assert list(three.table.workers.values()) == workers, "none has died of it"


def test_a_supervisor_without_descriptors_lets_connections_wait(three: Group) -> None:
    supervisor = three.server.process.pid
    limit_descriptors(supervisor, 3)
    ticks = cpu_ticks(supervisor)
    with socket.create_connection(("127.0.0.1", three.server.port), timeout=1) as connection:
        with pytest.raises(TimeoutError):
            status(connection)
        spent = (cpu_ticks(supervisor) - ticks) / os.sysconf("SC_CLK_TCK")
        assert spent < 0.5, "it tries again and again"
        limit_descriptors(supervisor, 1000)
        connection.settimeout(30)
        assert connection.recv(1000).split()[1] == b"200"
    log = three.server.log.read_text()
    assert log.count("Connections have to wait: Too many open files.") == 1


# --- no room ---------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a small disk")
def test_a_full_disk_fails_no_request_and_hinders_no_replacement(
    models: Path, tmp_path: Path
) -> None:
    mount = f'mount -t tmpfs -o size=4m none {tmp_path / "small"} && exec "$@"'
    (tmp_path / "small").mkdir()
    with running(
        models,
        tmp_path / "log",
        *("--workers", "2", "--default-model", "tiny"),
        env={"DSS_WORKERS_FOLDER": str(tmp_path / "small")},
        inside=("unshare", "--mount", "sh", "-c", mount, "sh"),
    ) as server:
        small = Path(f"/proc/{server.process.pid}/root{tmp_path / 'small'}")
        two = Group(server, next(small.glob("dss-*")))
        ask(two, connections=2)
        fill(small / "large")
        for _ in range(4):
            assert httpx.post(server.url + "/topk", json={"inputs": []}).status_code == 422
            assert httpx.get(server.url + "/nowhere").status_code == 404
            assert httpx.get(server.url + "/metrics").status_code == 200
        ask(two, connections=4)
        assert two.total() == 6
        killed = two.table.workers[0]
        os.kill(killed, signal.SIGKILL)
        (small / "large").unlink()  # the list of workers needs room; what is counted does not
        wait_until(lambda: two.table.workers.get(0) not in (None, killed))
        ask(two, connections=4)
        assert two.total() == 10
    log = server.log.read_text()
    assert 1 <= log.count("keeps some counters to itself, since there is no room") <= 2
    assert "Traceback" not in log


def fill(file: Path) -> None:
    with file.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(4096))


# --- the end ---------------------------------------------------------------------------------


def test_a_signal_to_every_process_counts_once_and_requests_finish(
    models: Path, tmp_path: Path
) -> None:
    """As a service manager sends it; the worker that gets it twice must not hurry."""
    with group(models, tmp_path, "--drain-seconds", "1") as two:
        body = json.dumps(TOPK).encode()
        with socket.create_connection(("127.0.0.1", two.server.port), timeout=30) as connection:
            connection.sendall(
                b"POST /topk HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body)
            )
            supervisor = two.server.process.pid
            for process in (*two.table.workers.values(), two.table.fork_server, supervisor):
                assert process is not None
                os.kill(process, signal.SIGTERM)
            two.server.wait_for("/readyz", 503)
            wait_until(lambda: refused(two.server.port))
            connection.sendall(body)
            assert connection.recv(1000).split()[1] == b"200"
        assert two.server.process.wait(30) == 0
        assert not two.folder.exists()


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a process number 1")
def test_process_1_takes_care_of_orphans_and_obeys_signals(models: Path, tmp_path: Path) -> None:
    inside = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    with group(models, tmp_path, inside=inside) as two:
        (supervisor,) = children(two.server.process.pid)
        assert two.table.supervisor == 1
        subprocess.run(
            ["nsenter", f"--target={supervisor}", "--pid", "sh", "-c", "sleep 0.01 & exit"],
            check=True,
        )
        os.kill(next(iter(workers_of(supervisor))), signal.SIGKILL)
        wait_until(lambda: two.table.restarts == 1 and len(two.table.workers) == 2)
        ask(two, connections=4)
        wait_until(lambda: all(alive(child) for child in children(supervisor)))
        assert len(children(supervisor)) == 3
        os.kill(supervisor, signal.SIGTERM)
        assert two.server.process.wait(30) == 0
        assert not two.folder.exists()


def workers_of(supervisor: int) -> list[int]:
    """The fork server has a single thread; a worker has more."""
    return [
        child
        for child in children(supervisor)
        if len(list(Path(f"/proc/{child}/task").iterdir())) > 1
    ]
