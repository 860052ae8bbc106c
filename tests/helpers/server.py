"""Real HTTP servers for tests: they are waited for by asking them, and stopped at the end."""

import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn

from service.http.app import Application

DEADLINE_SECONDS = 60.0
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Running:
    url: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    tls: ssl.SSLContext | None = None  # of a client

    def wait_for(self, path: str, status: int = 200, seconds: float = DEADLINE_SECONDS) -> None:
        def answered() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"The server ended:\n{self.log.read_text()}")
            with suppress(httpx.TransportError):
                verify = self.tls or True
                return httpx.get(self.url + path, verify=verify).status_code == status
            return False

        wait_until(answered, seconds)


@contextmanager
def running(
    models: Path,
    log: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    inside: Sequence[str] = (),
    host: str = "127.0.0.1",
    port: int | None = None,
) -> Iterator[Running]:
    """`dss serve` in a process, ready; it is killed at the end unless it has ended by itself.

    `tls` is how a client asks it, if it speaks TLS; `inside` is a command that runs it.
    """
    port = port or free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DSS_")}
    command = [*inside, sys.executable, "-m", "service.cli", "serve", "--models", str(models)]
    command += ["--host", host, "--port", str(port), *arguments]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env={**clean, **(env or {})}
        )
    scheme = "http" if tls is None else "https"
    server = Running(f"{scheme}://{host}:{port}", port, process, log, tls)
    try:
        server.wait_for("/readyz")
        yield server
    finally:
        process.kill()
        process.wait()


@contextmanager
def in_thread(
    app: Application, *, access_log: bool = False, timeout_keep_alive: int = 75
) -> Iterator[httpx.Client]:
    """The application under uvicorn in this process, for tests that hold its engine's strings."""
    port = free_port()
    config = uvicorn.Config(
        app,
        port=port,
        http=app.connection,
        log_config=None,
        access_log=access_log,
        timeout_keep_alive=timeout_keep_alive,
        timeout_graceful_shutdown=10,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


def wait_until(condition: Callable[[], bool], seconds: float = DEADLINE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("The condition never came true.")
        time.sleep(POLL_SECONDS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
