"""One worker of several: the same server, given its connections by the supervisor.

It is forked by `nursery.py`, with `Orders` from the supervisor. A socket joins the two: the
supervisor sends each connection as a file descriptor and says when to stop, the worker says that
its event loop turns. That socket ends when the supervisor does, and then so does the worker.
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

from prometheus_client import CollectorRegistry

from service import settings
from service.errors import DSSError
from service.http.app import Application, create_app
from service.http.auth.tls import HANDSHAKE_SECONDS
from service.server.messages import (
    AT_ONCE,
    BEAT,
    BEAT_SECONDS,
    BORN,
    CONNECTION,
    EMPTY_BEAT,
    INTERRUPT,
    READY,
    TERMINATE,
    Order,
    Orders,
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

WELCOME_SECONDS = 1.0  # at the end, for those whose connection is still being made


def run(orders: Orders, order: Order, channel: socket.socket) -> None:
    with channel:
        channel.send(b"%b%d" % (BORN, os.getpid()))
        loaded = settings.load(orders.settings)
        logging_setup.configure(loaded, order.number)
        metrics = shared_metrics(orders.folder, order.number)
        try:
            app = create_app(loaded, metrics=metrics, shared=orders.folder)
        except DSSError as error:  # the supervisor would have found it out, could it import this
            logger.error("%s", error)
            sys.exit(1)
        server = WorkerServer(app, loaded, channel, replaces=order.replaces)
        server.watchdog.start()
        server.run(sockets=[])
        server.watchdog.end()
    if server.orphaned:  # nobody else is left to do it
        shutil.rmtree(orders.folder, ignore_errors=True)
    if server.failure is not None:
        sys.exit(1)


def shared_metrics(folder: Path, number: int) -> Metrics:
    registry = CollectorRegistry()
    read_roster = partial(worker_table.read, folder)
    registry.register(Processes(read_roster))
    return Metrics(registry, SharedCounters(folder, number), read_roster)


class WorkerServer(Server):
    def __init__(
        self, app: Application, settings: Settings, channel: socket.socket, *, replaces: bool
    ) -> None:
        super().__init__(app, settings)
        self._channel = channel
        self._channel.setblocking(False)
        self._replaces = replaces
        self._said_beat = b""
        self.orphaned = False
        self._arriving: set[asyncio.Task[object]] = set()
        self._loss = RateLimited()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._beat()
        await super().startup(sockets)
        repository = self._state.repository
        # The first workers answer probes while they load. Later ones have others beside them that
        # can answer everything, so they wait.
        while self._replaces and not (
            repository.loaded or self._state.load_failed or self.should_exit
        ):
            await asyncio.sleep(TICK_SECONDS)
        asyncio.get_running_loop().add_reader(self._channel, self._listen)
        self._channel.send(READY)

    async def on_tick(self, counter: int) -> bool:
        self._state.metrics.publish_queues()
        if self._beat_now() != self._said_beat:  # others shall be asked from now on, or this one
            self._tell()
        if self._state.repository.loaded:
            self._state.metrics.loaded()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        while self._listen():
            pass
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        if self._arriving:
            # A client that is slow to shake hands has asked for nothing yet.
            _, silent = await asyncio.wait(self._arriving, timeout=WELCOME_SECONDS)
            for task in silent:
                task.cancel()
        await super().shutdown(sockets)

    def _beat(self) -> None:
        """The event loop turns, also while it starts and stops."""
        self.watchdog.beat()
        self._tell()
        asyncio.get_running_loop().call_later(BEAT_SECONDS, self._beat)

    def _tell(self) -> None:
        beat = self._beat_now()
        with contextlib.suppress(OSError):  # the supervisor does not listen now, or not any more
            self._channel.send(beat)
            self._said_beat = beat

    def _beat_now(self) -> bytes:
        return BEAT if self._can_answer() else EMPTY_BEAT

    def _can_answer(self) -> bool:
        """Others are asked while this one loads or ends, or if its bundles have gone."""
        if self.should_exit:
            return False
        try:
            self._state.repository.get()
        except DSSError:
            return False
        return True

    def _listen(self) -> bool:
        """Do one thing that the supervisor has said; False if there is none."""
        try:
            said, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
        except BlockingIOError:
            return False
        except OSError:
            said, descriptors = b"", []
        for descriptor in descriptors:
            self._take(socket.socket(fileno=descriptor))
        if said == CONNECTION and not descriptors and self._loss.allow():
            logger.error("A connection is lost: this process has no descriptor for it.")
        if said in (TERMINATE, INTERRUPT, AT_ONCE):
            self._stop(said)
        if not said and not self.orphaned:  # the supervisor has died
            self.orphaned = True
            asyncio.get_running_loop().remove_reader(self._channel)
            self.handle_exit(signal.SIGINT, None)
        return bool(said)

    def _stop(self, order: bytes) -> None:
        """As if by a signal; but one that came before, from whoever sent it to all, counts."""
        if not self.should_exit:
            self.handle_exit(signal.SIGTERM if order == TERMINATE else signal.SIGINT, None)
        if order == AT_ONCE:
            self.handle_exit(signal.SIGINT, None)

    def _take(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        task = asyncio.create_task(self._welcome(connection))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _welcome(self, connection: socket.socket) -> None:
        tls = self.config.ssl
        with contextlib.suppress(OSError):  # the client has left, or the handshake failed
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol,
                connection,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if tls else None,
            )

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made
