"""Several worker processes behind one port, as real processes."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from server import Running, running, wait_until
from tiny import rows_for

from service import health, roster, workers
from service.app import create_app
from service.cells import SharedCells
from service.errors import NotStarted
from service.health import NotReady
from service.roster import Roster
from service.settings import Settings
from service.state import State
from service.worker import WorkerServer

TOPK = {"inputs": rows_for(0, 1).tolist(), "k": 1}
STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Group:
    server: Running
    folder: Path  # where its workers' counts are

    @property
    def roster(self) -> Roster:
        return roster.read(self.folder)

    def answered(self) -> list[int]:
        """Good answers to /topk by each worker."""
        key = ("http", "/topk", "POST", "200")
        reader = SharedCells(self.folder, 99)
        return [int(sheet.values[1:].sum()) for sheet in reader.sheets(key)]

    def total(self) -> float:
        """The same as /metrics has it, whichever worker is asked."""
        totals = set()
        for _ in self.roster.workers:  # each connection is another worker's
            text = httpx.get(self.server.url + "/metrics").text
            line = 'dss_http_requests_total{method="POST",route="/topk",status="200"} '
            totals |= {float(found[len(line) :]) for found in text.splitlines() if line in found}
        (total,) = totals
        return total


@contextmanager
def group(models: Path, folder: Path, *arguments: str, workers: int = 2) -> Iterator[Group]:
    arguments = ("--workers", str(workers), "--default-model", "tiny", *arguments)
    with running(models, folder / "log", *arguments, env={"TMPDIR": str(folder)}) as server:
        (shared,) = folder.glob("dss-*")
        yield Group(server, shared)


@pytest.fixture(scope="module")
def two(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with group(models, tmp_path_factory.mktemp("two")) as started:
        yield started


def ask(group: Group, connections: int, times: int = 1) -> None:
    """Good requests, on connections that are all open at once."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(httpx.Client(base_url=group.server.url, timeout=30))
            for _ in range(connections)
        ]
        for _ in range(times):
            for client in clients:
                assert client.post("/topk", json=TOPK).status_code == 200


def test_connections_are_dealt_out_evenly(two: Group) -> None:
    before = two.answered() or [0, 0]
    ask(two, connections=16, times=3)
    assert [now - then for now, then in zip(two.answered(), before, strict=True)] == [24, 24]


def test_every_worker_shows_the_totals(two: Group) -> None:
    ask(two, connections=2)
    before = two.total()
    ask(two, connections=5, times=4)
    assert two.total() == before + 20 == sum(two.answered())
    rows = [expert_rows(two) for _ in two.roster.workers]
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
        killed = two.roster.workers[0]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: two.roster.workers.get(0) != killed)
        ask(two, connections=4)  # by the other worker, or by the new one
        assert two.total() == 12
        wait_until(lambda: 0 in two.roster.workers)
        assert two.roster.restarts == 1
        assert httpx.get(two.server.url + "/readyz").status_code == 200

        def both_answer() -> bool:
            before = two.answered()
            ask(two, connections=2)
            return all(now > then for now, then in zip(two.answered(), before, strict=True))

        wait_until(both_answer)
        assert two.total() == sum(two.answered())


def test_sigterm_fails_readiness_first_and_ends_everything_with_0(
    models: Path, tmp_path: Path
) -> None:
    with group(models, tmp_path, "--drain-seconds", "2") as two:
        processes = list(two.roster.workers.values())
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
        processes = list(two.roster.workers.values())
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

        def check_live(state: State) -> None:
            raise NotReady(f"An engine of {state.settings.models} has died.")

        monkeypatch.setattr(health, "check_live", check_live)
        assert asyncio.run(worker.on_tick(1))


def alive(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_a_taken_port_is_one_sentence_and_a_status(two: Group, models: Path) -> None:
    port = str(two.server.port)
    command = [sys.executable, "-m", "service.cli", "serve", "--models", str(models)]
    ended = subprocess.run(
        [*command, "--workers", "2", "--port", port], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        f"Error: The server could not start on 127.0.0.1:{port}."
    )
    assert "Traceback" not in ended.stderr


def test_workers_that_cannot_start_are_no_server(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(NotStarted):
        workers.supervise(Settings(models=models, port=0, workers=2))


def test_the_supervisor_imports_no_server() -> None:
    check = "import sys, service.cli, service.workers; print(sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    ).stdout
    for heavy in ("numpy", "numba", "onnx", "fastapi", "uvicorn", "prometheus_client"):
        assert f"'{heavy}'" not in loaded
