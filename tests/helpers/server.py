"""Real HTTP servers for tests: a server is asked until it is ready, and stopped at the end."""

import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx
import uvicorn

from service.bench.server import ServerProcess, free_port, serving
from service.http.app import Application

__all__ = ["Running", "free_port", "in_thread", "running", "wait_until"]

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
        host = urlsplit(self.url).hostname or ""
        server = ServerProcess(host, self.port, tls=self.tls, process=self.process, log=self.log)
        server.wait_for(path, status, seconds)


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
    with serving(
        models,
        log,
        *arguments,
        env=env,
        prefix=inside,
        host=host,
        port=port,
        tls=tls,
        stop_signal=signal.SIGKILL,
    ) as server:
        yield Running(server.url, server.port, server.process, log, tls)


@contextmanager
def in_thread(
    app: Application,
    *,
    access_log: bool = False,
    timeout_keep_alive: int = 75,
    loop: Literal["uvloop", "asyncio"] = "uvloop",
    tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
) -> Iterator[httpx.Client]:
    """The application under uvicorn in this process, for tests that hold its engine's strings.

    `tls` are the contexts of the server and of the client.
    """
    port = free_port()
    config = uvicorn.Config(
        app,
        port=port,
        http=app.connection,
        log_config=None,
        access_log=access_log,
        loop=loop,
        ssl_context_factory=None if tls is None else lambda _config, _default: tls[0],
        timeout_keep_alive=timeout_keep_alive,
        timeout_graceful_shutdown=10,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        scheme, verify = ("http", True) if tls is None else ("https", tls[1])
        url = f"{scheme}://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=30, verify=verify) as client:
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
