"""Runs the application under uvicorn, and stops it without failing requests.

SIGTERM: /readyz fails while requests are still answered, so that load balancers notice, and each
answer ends its connection; then no connection is accepted, requests under way finish, and the
process ends with status 0. SIGINT, from someone at a terminal, skips the first step. A second
signal ends everything at once.

A process that only a restart can repair ends with a failure: an engine that cannot be started
again, or a blocked event loop.
"""

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Any, cast

import uvicorn

from service.errors import ModelsFolderMissing, NeedsRestart, NotStarted
from service.http import health
from service.http.app import Application, create_app
from service.http.auth.tls import HANDSHAKE_SECONDS
from service.http.inference.connection.sequential import SequentialConnection
from service.server.watchdog import Watchdog
from service.settings import Settings
from service.system import cpu_quota, file_descriptors, malloc
from service.system.listening import CONNECTING_SECONDS, accept_all, keep_out_new
from service.telemetry import logging_setup

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.05
# How long the event loop may keep an engine's thread from going on after a call: Python's own 5 ms
# would be more than most calls take.
SWITCH_SECONDS = 0.0001
# Longer than the idle timeout of common load balancers, so that they close first.
KEEP_ALIVE_SECONDS = 75
HANDSHAKES_SECONDS = 1.0  # at the end, for connections whose TLS handshake is under way


def serve(settings: Settings) -> None:
    if not settings.models.is_dir():
        raise ModelsFolderMissing(f"There is no models folder {settings.models}.")
    logging_setup.configure(settings)
    file_descriptors.raise_limit()
    logger.info("%s", cpu_quota.summary(settings.workers, settings.engine.threads))
    server = Server(create_app(settings), settings)
    gc.collect()
    gc.freeze()  # these objects stay: the collector need not visit them again
    server.watchdog.start()
    with contextlib.suppress(SystemExit):  # how uvicorn ends when it cannot bind
        server.run()
    server.watchdog.end()
    if not server.started:
        raise NotStarted(f"The server could not start on {settings.host}:{settings.port}.")
    if server.failure is not None:
        raise NeedsRestart(server.failure)


def _tls_context(app: Application) -> Callable[[Any, Any], ssl.SSLContext] | None:
    """For uvicorn; our own context can load a new certificate later."""
    tls = app.tls
    return None if tls is None else lambda _config, _default: tls.context


class Server(uvicorn.Server):
    def __init__(self, app: Application, settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                loop="uvloop",
                http=app.connection,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,  # telemetry/access_log.py has its own
                server_header=False,
                ssl_context_factory=_tls_context(app),
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=math.ceil(settings.stop_seconds),
            )
        )
        self._app = app
        self._state = app.state.service
        self._drain_seconds = settings.drain_seconds
        self._serve_until = 0.0
        self._opening: set[asyncio.Task[object]] = set()  # connections
        self.failure: str | None = None  # why it ended by itself
        self.watchdog = Watchdog(settings.stuck_seconds)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        malloc.return_large_blocks()
        await super().startup(sockets)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)

    def _reload(self) -> None:
        self._reloading = asyncio.ensure_future(self._app.refresh(now=True))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own handler raises the signal again at the end; a clean stop is no failure.
        del frame
        if self.should_exit:
            self.force_exit = True
        elif sig == signal.SIGTERM:
            self._serve_until = monotonic() + self._drain_seconds
        self._state.draining = True
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        self.watchdog.beat()
        if self.failure is None and not self.should_exit:
            self.failure = health.needs_restart(self._state)
            if self.failure is not None:
                logger.critical("%s", self.failure)
                self.handle_exit(signal.SIGINT, None)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.watchdog.end()  # there are no ticks from here on; stop_seconds limits the rest
        await self._stop_listening()
        if self._opening:
            # A client that is slow in its TLS handshake has sent no request yet.
            _, slow = await asyncio.wait(self._opening, timeout=HANDSHAKES_SECONDS)
            for task in slow:
                task.cancel()
        await super().shutdown(sockets)

    async def _stop_listening(self) -> None:
        with contextlib.ExitStack() as stack:
            own = [
                stack.enter_context(socket.socket(fileno=os.dup(listening.fileno())))
                for server in self.servers
                for listening in server.sockets
            ]
            if own:
                for listening in own:
                    listening.setblocking(False)
                    keep_out_new(listening)
                await asyncio.sleep(CONNECTING_SECONDS)
            for server in self.servers:
                server.close()
            for listening in own:
                for connection in accept_all(listening):
                    self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        """Serves a connection that uvicorn has not accepted itself."""
        connection.setblocking(False)
        task = asyncio.create_task(self._open_connection(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open_connection(self, connection: socket.socket) -> None:
        tls = self.config.ssl
        with contextlib.suppress(OSError):  # the client has left, or the handshake failed
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol,
                connection,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if tls else None,
            )

    def _protocol(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    async def main_loop(self) -> None:
        await super().main_loop()
        for connection in list(self.server_state.connections):
            cast(SequentialConnection, connection).close_after_answer()
        while monotonic() < self._serve_until and not self.force_exit:
            self.watchdog.beat()
            await asyncio.sleep(TICK_SECONDS)
