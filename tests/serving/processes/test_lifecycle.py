"""How a server ends: after one signal, after two, and by itself when only a restart helps."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from time import monotonic

import httpx
import pytest
from helpers.paths import TESTS
from helpers.raw_http import Connection, request
from helpers.server import Running, free_port, running, wait_until
from helpers.tiny_bundle import rows_for

TOPK = {"inputs": rows_for(0).tolist(), "k": 1}
BODY = b'{"inputs": [[1, 0, 0, 0]], "k": 1}'


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_second_signal_ends_at_once(models: Path, tmp_path: Path, workers: str) -> None:
    arguments = ("--drain-seconds", "60", "--workers", workers)
    with running(models, tmp_path / "log", *arguments) as server, Connection(server.port) as held:
        held.send(request(1, BODY)[:-5])  # a request under way, which would be waited for
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("/readyz", 503)
        assert httpx.get(server.url + "/livez").status_code == 200
        told = monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(30)
        assert monotonic() - told < 10


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_answers_what_is_under_way_and_ends_with_0_in_the_grace_time(
    models: Path, tmp_path: Path, workers: str
) -> None:
    arguments = ("--drain-seconds", "2", "--workers", workers)
    with running(models, tmp_path / "log", *arguments) as server, Connection(server.port) as held:
        whole = request(1, BODY)
        held.send(whole[:-5])
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("/readyz", 503)
        assert httpx.post(server.url + "/topk", json=TOPK).status_code == 200

        def refuses() -> bool:
            try:
                httpx.get(server.url + "/livez")
            except httpx.TransportError:
                return True
            return False

        wait_until(refuses)
        held.send(whole[-5:])
        assert held.answer()[0] == 200
        assert server.process.wait(30) == 0


ENGINE_NEEDS_RESTART = """
import sys
sys.path.insert(0, {tests!r})
from functools import partial
from helpers.fake_engine import FakeEngine
from service.batching import batcher, lane
from service.cli import main as cli
from service.server import server
lane.PROBE_SECONDS = 0.05
warm = batcher.Batcher.warm
def crash_after_warming(self, rows, k):
    warm(self, rows, k)
    self._engine.failure = SystemExit()
batcher.Batcher.warm = crash_after_warming
server.create_app = partial(server.create_app, engine_factory=lambda *_: FakeEngine(hidden_size=4))
sys.argv = ["dss", "serve", "--models", {models!r}, "--port", {port!r}]
cli.main()
"""


def test_an_engine_that_needs_a_restart_ends_the_process_with_a_sentence(
    models: Path, tmp_path: Path
) -> None:
    port = free_port()
    program = ENGINE_NEEDS_RESTART.format(tests=str(TESTS), models=str(models), port=str(port))
    log = tmp_path / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)], stdout=stream, stderr=stream
        )
    server = Running(f"http://127.0.0.1:{port}", port, process, log)
    try:
        server.wait_for("/startupz")
        assert httpx.post(server.url + "/topk", json=TOPK | {"k": 2}).status_code == 500
        assert process.wait(60) == 1
    finally:
        process.kill()
        process.wait()
    assert "only a restart helps." in log.read_text().splitlines()[-1]


def test_a_process_that_was_stopped_for_long_goes_on(models: Path, tmp_path: Path) -> None:
    """The watchdog counts its own looks, so a pause of everything is no stand-still."""
    env = {"DSS_STUCK_SECONDS": "2"}
    with running(models, tmp_path / "log", env=env) as server:
        os.kill(server.process.pid, signal.SIGSTOP)
        stopped = monotonic()
        wait_until(lambda: monotonic() - stopped > 4)  # what is waited for is the time itself
        os.kill(server.process.pid, signal.SIGCONT)
        assert httpx.post(server.url + "/topk", json=TOPK, timeout=30).status_code == 200
        assert server.process.poll() is None
