"""Several worker processes behind one port, as real processes."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from helpers.server import wait_until
from helpers.worker_group import Group, alive, ask, group

from service.http import health
from service.http.app import create_app
from service.server.listener import Listener
from service.server.worker import WorkerServer
from service.server.worker_process import WorkerProcess
from service.settings import Settings

STOP_SECONDS = 30.0
BROKEN = "import sys; from service.cli.main import cli; sys.executable = '/bin/false'"


@pytest.fixture(scope="module")
def two(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with group(models, tmp_path_factory.mktemp("two")) as started:
        yield started


def test_connections_are_dealt_out_evenly(two: Group) -> None:
    before = two.answered()
    ask(two, connections=16, times=3)
    assert {number: now - before.get(number, 0) for number, now in two.answered().items()} == {
        0: 24,
        1: 24,
    }


def test_every_worker_shows_the_totals(two: Group) -> None:
    ask(two, connections=2)
    before = two.total()
    ask(two, connections=5, times=4)
    assert two.total() == before + 20 == sum(two.answered().values())
    rows = [expert_rows(two) for _ in two.table.workers]
    assert rows[0] == rows[1]
    assert sum(rows[0]) == 2 * two.total()


def expert_rows(group: Group) -> list[int]:
    told = httpx.get(group.server.url + "/models/tiny/experts").json()
    return [expert["rows"] for expert in told["experts"]]


def test_the_group_is_shown_as_one_process(two: Group) -> None:
    text = httpx.get(two.server.url + "/metrics").text
    values = {
        name: float(value)
        for name, _, value in (line.partition(" ") for line in text.splitlines())
        if name.startswith(("process_", "dss_worker"))
    }
    assert values["dss_workers"] == 2
    assert values["dss_worker_restarts_total"] == 0
    assert values["process_cpu_seconds_total"] > 0
    assert values["process_resident_memory_bytes"] > 2**20


def test_a_killed_worker_is_replaced_and_its_counts_stay(models: Path, tmp_path: Path) -> None:
    with group(models, tmp_path) as two:
        ask(two, connections=4, times=2)
        killed = two.table.workers[0]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: two.table.workers.get(0) != killed)
        ask(two, connections=4)  # by the other worker, or by the new one
        assert two.total() == 12
        wait_until(lambda: 0 in two.table.workers)
        assert two.table.restarts == 1
        assert httpx.get(two.server.url + "/readyz").status_code == 200

        def both_answer() -> bool:
            before = two.answered()
            ask(two, connections=2)
            return all(now > before[number] for number, now in two.answered().items())

        wait_until(both_answer)
        assert two.total() == sum(two.answered().values())


def test_sigterm_fails_readiness_first_and_ends_everything_with_0(
    models: Path, tmp_path: Path
) -> None:
    with group(models, tmp_path, "--drain-seconds", "2") as two:
        processes = list(two.table.workers.values())
        two.server.process.send_signal(signal.SIGTERM)
        two.server.wait_for("/readyz", 503)
        ask(two, connections=2)
        assert two.server.process.wait(STOP_SECONDS) == 0
        assert not any(alive(process) for process in processes)
        assert not two.folder.exists()


def test_a_second_signal_ends_the_drain(models: Path, tmp_path: Path) -> None:
    with group(models, tmp_path, "--drain-seconds", "600") as two:
        two.server.process.send_signal(signal.SIGTERM)
        two.server.wait_for("/readyz", 503)
        two.server.process.send_signal(signal.SIGTERM)
        assert two.server.process.wait(STOP_SECONDS) == 0


def test_workers_do_not_outlive_the_supervisor(models: Path, tmp_path: Path) -> None:
    with group(models, tmp_path) as two:
        processes = list(two.table.workers.values())
        two.server.process.kill()
        wait_until(lambda: not any(alive(process) for process in processes))
        wait_until(lambda: not two.folder.exists())


def test_a_worker_with_a_dead_engine_ends_by_itself(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        settings = Settings(models=models)
        worker = WorkerServer(create_app(settings), settings, theirs, replaces=False)
        assert not asyncio.run(worker.on_tick(0))

        monkeypatch.setattr(health, "needs_restart", lambda _: "An engine has died.")
        assert asyncio.run(worker.on_tick(1))


def test_a_taken_port_is_one_sentence_and_a_status(two: Group, models: Path) -> None:
    port = str(two.server.port)
    command = [sys.executable, "-m", "service.cli", "serve", "--models", str(models)]
    ended = subprocess.run(
        [*command, "--workers", "2", "--port", port], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert f"Error: The server could not start on 127.0.0.1:{port}." in ended.stderr.splitlines()
    assert "Traceback" not in ended.stderr


def test_workers_that_cannot_start_are_no_server(models: Path) -> None:
    serve = f"cli(['serve', '--models', {str(models)!r}, '--port', '0', '--workers', '2'])"
    ended = subprocess.run(
        [sys.executable, "-c", f"{BROKEN}; {serve}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert "Error: The server could not start on 127.0.0.1:0." in ended.stderr.splitlines()
    assert re.search("Worker [01] could not be started.", ended.stderr)
    assert "Traceback" not in ended.stderr


def test_the_supervisor_imports_no_server() -> None:
    check = "import sys, service.cli, service.server.supervisor; print(sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    ).stdout
    for heavy in ("numpy", "numba", "onnx", "fastapi", "uvicorn", "prometheus_client"):
        assert f"'{heavy}'" not in loaded


@pytest.mark.parametrize(
    ("empty", "silent", "takers"),
    [
        ((), (), [0, 1, 2, 0, 1, 2]),
        ((1,), (), [0, 2, 0, 2, 0, 2]),
        ((), (0, 2), [1, 1, 1, 1, 1, 1]),
        ((0,), (1,), [2, 2, 2, 2, 2, 2]),
        ((0, 1), (2,), [0, 1, 2, 0, 1, 2]),
    ],
)
def test_connections_go_to_workers_that_turn_and_have_a_model(
    empty: tuple[int, ...], silent: tuple[int, ...], takers: list[int]
) -> None:
    workers: dict[int, WorkerProcess] = {}
    listener = Listener([], workers, 3)
    with ExitStack() as stack:
        theirs = {}
        for number in range(3):
            ours, theirs[number] = map(stack.enter_context, socket.socketpair())
            theirs[number].setblocking(False)
            worker = workers[number] = WorkerProcess(number, ours, ready_since=0.0)
            worker.has_model = number not in empty
            worker.silent_seconds = 2.0 * (number in silent)
        found = []
        for _ in takers:
            listener.deal(socket.socket())
            for number, channel in theirs.items():
                with suppress(BlockingIOError):
                    _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
                    os.close(descriptors[0])
                    found.append(number)
    assert found == takers
