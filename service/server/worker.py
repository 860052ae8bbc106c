"""One worker of several: the same server, which receives its connections from the supervisor.

The fork server forks it. A socket, its channel, connects it to the supervisor, which sends each
connection as a file descriptor and says when to stop; the worker sends heartbeats while its event
loop runs. The channel closes when the supervisor ends, and then the worker ends too.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from time import monotonic

from prometheus_client import CollectorRegistry

from service import settings
from service.errors import DSSError
from service.http.app import Application, create_app
from service.server.messages import (
    CONNECTION,
    FINISH,
    HEARTBEAT,
    HEARTBEAT_NO_MODEL,
    HEARTBEAT_SECONDS,
    INTERRUPT,
    READY,
    STARTED,
    STOP_NOW,
    TERMINATE,
    WorkerConfig,
    WorkerRequest,
)
from service.server.server import TICK_SECONDS, Server
from service.settings import Settings
from service.shared_state import worker_table
from service.shared_state.counters import SharedCounters
from service.system.file_descriptors import RateLimited
from service.telemetry import logging_setup
from service.telemetry.metrics.process import Processes
from service.telemetry.metrics.registry import Metrics

logger = logging.getLogger(__name__)

LATE_SECONDS = 5.0  # how much longer than it should take to hear that no connection comes any more


def run(config: WorkerConfig, request: WorkerRequest, channel: socket.socket) -> None:
    with channel:
        channel.send(b"%b%d" % (STARTED, os.getpid()))
        loaded = settings.load(config.settings)
        logging_setup.configure(loaded, request.number)
        metrics = shared_metrics(config.folder, request.number, loaded.workers)
        try:
            app = create_app(loaded, metrics=metrics, shared=config.folder)
        except DSSError as error:  # the supervisor cannot check this: it does not import the server
            logger.error("%s", error)
            sys.exit(1)
        server = WorkerServer(app, loaded, channel, replaces=request.replaces)
        server.watchdog.start()
        server.run(sockets=[])
        server.watchdog.end()
    if server.orphaned:  # the supervisor can no longer remove it
        shutil.rmtree(config.folder, ignore_errors=True)
    if server.failure is not None:
        sys.exit(1)


def shared_metrics(folder: Path, number: int, workers: int) -> Metrics:
    registry = CollectorRegistry()
    read_workers = partial(worker_table.read, folder)
    registry.register(Processes(read_workers))
    return Metrics(registry, SharedCounters(folder, number, workers), read_workers)


class WorkerServer(Server):
    def __init__(
        self, app: Application, settings: Settings, channel: socket.socket, *, replaces: bool
    ) -> None:
        super().__init__(app, settings)
        self._channel = channel
        self._channel.setblocking(False)
        self._replaces = replaces
        self._last_heartbeat = b""
        self.orphaned = False  # the supervisor has died
        self._lost_connections = RateLimited()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._keep_beating()
        await super().startup(sockets)
        repository = self._state.repository
        # The first workers answer health checks while they load. A replacement takes connections
        # only once it has loaded: the other workers can answer everything until then.
        while self._replaces and not (
            repository.loaded or self._state.load_failed or self.should_exit
        ):
            await asyncio.sleep(TICK_SECONDS)
        asyncio.get_running_loop().add_reader(self._channel, self._receive)
        self._channel.send(READY)

    async def on_tick(self, counter: int) -> bool:
        self._state.metrics.publish_queues()
        if self._heartbeat() != self._last_heartbeat:  # the supervisor prefers other workers now
            self._send_heartbeat()
        if self._state.repository.loaded:
            self._state.metrics.loaded()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        while self._receive():
            pass
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        await super().shutdown(sockets)

    def _keep_beating(self) -> None:
        """The event loop runs, also while the server starts and stops."""
        self.watchdog.beat()
        self._send_heartbeat()
        asyncio.get_running_loop().call_later(HEARTBEAT_SECONDS, self._keep_beating)

    def _send_heartbeat(self) -> None:
        heartbeat = self._heartbeat()
        with contextlib.suppress(OSError):  # the channel is full, or the supervisor has ended
            self._channel.send(heartbeat)
            self._last_heartbeat = heartbeat

    def _heartbeat(self) -> bytes:
        return HEARTBEAT if self._can_answer() else HEARTBEAT_NO_MODEL

    def _can_answer(self) -> bool:
        """Not while it loads or stops, nor without a model that serves."""
        if self.should_exit:
            return False
        try:
            self._state.repository.get()
        except DSSError:
            return False
        return True

    def _receive(self) -> bool:
        """Handle one message of the supervisor; False if there is none."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
        except BlockingIOError:
            return False
        except OSError:
            message, descriptors = b"", []
        for descriptor in descriptors:
            self._take(socket.socket(fileno=descriptor))
        if message == CONNECTION and not descriptors and self._lost_connections.allow():
            logger.error("A connection is lost: this process has no file descriptor left for it.")
        if message in (TERMINATE, INTERRUPT, STOP_NOW):
            self._stop(message)
        if message == FINISH:
            self._serve_until = 0.0
        if not message and not self.orphaned:
            self.orphaned = True
            asyncio.get_running_loop().remove_reader(self._channel)
            self.handle_exit(signal.SIGINT, None)
        return bool(message)

    def _stop(self, message: bytes) -> None:
        """As after a signal; if this process has received that signal too, it counts once."""
        if not self.should_exit:
            self.handle_exit(signal.SIGTERM if message == TERMINATE else signal.SIGINT, None)
        if message == TERMINATE:
            self._serve_until = monotonic() + self._drain_seconds + LATE_SECONDS  # until FINISH
        if message == STOP_NOW:
            self.handle_exit(signal.SIGINT, None)
