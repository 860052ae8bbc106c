"""One worker of several: the same server, given its connections by the supervisor.

The supervisor starts `python -m service.worker`, says on its input what to do (`Orders`), and sends
each connection as a file descriptor over a socket of theirs. That socket ends when the supervisor
does, and then so does the worker.
"""

import asyncio
import logging
import shutil
import signal
import socket
import sys
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from service import health, logs, roster, settings
from service.app import Application, create_app
from service.cells import SharedCells
from service.metrics import Metrics
from service.processes import Processes
from service.server import TICK_SECONDS, Server
from service.settings import Settings
from service.workers import READY, Orders

logger = logging.getLogger(__name__)


def main() -> None:
    orders = Orders.model_validate_json(sys.stdin.read())
    loaded = settings.load(orders.settings)
    logs.configure(loaded)
    with socket.socket(fileno=orders.channel) as channel:
        app = create_app(loaded, metrics=shared_metrics(orders.folder, orders.number))
        server = WorkerServer(app, loaded, channel, replaces=orders.replaces)
        server.run(sockets=[])
    if server.orphaned:  # nobody else is left to do it
        shutil.rmtree(orders.folder, ignore_errors=True)


def shared_metrics(folder: Path, number: int) -> Metrics:
    registry = CollectorRegistry()
    read_roster = partial(roster.read, folder)
    registry.register(Processes(read_roster))
    return Metrics(registry, SharedCells(folder, number), read_roster)


class WorkerServer(Server):
    def __init__(
        self, app: Application, settings: Settings, channel: socket.socket, *, replaces: bool
    ) -> None:
        super().__init__(app, settings)
        self._channel = channel
        self._channel.setblocking(False)
        self._replaces = replaces
        self.orphaned = False
        self._arriving: set[asyncio.Task[object]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        repository = self._state.repository
        # The first workers answer probes while they load. Later ones have others beside them that
        # can answer everything, so they wait.
        while self._replaces and not (
            repository.loaded or self._state.load_failed or self.should_exit
        ):
            await asyncio.sleep(TICK_SECONDS)
        asyncio.get_running_loop().add_reader(self._channel, self._take_connections)
        self._channel.send(READY)

    async def on_tick(self, counter: int) -> bool:
        self._state.metrics.publish_queues()
        if self._state.repository.loaded:
            self._state.metrics.loaded()
        try:
            health.check_live(self._state)
        except health.NotReady as failure:
            # A probe of /livez may meet another worker, so this one makes room by itself.
            if not self.should_exit:
                logger.critical("%s", failure)
                self.handle_exit(signal.SIGINT, None)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._take_connections()
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        await asyncio.gather(*self._arriving, return_exceptions=True)
        await super().shutdown(sockets)

    def _take_connections(self) -> None:
        try:
            said, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
        except BlockingIOError:
            return
        except OSError:
            said, descriptors = b"", []
        for descriptor in descriptors:
            self._take(socket.socket(fileno=descriptor))
        if not said:  # the supervisor has died
            self.orphaned = True
            asyncio.get_running_loop().remove_reader(self._channel)
            self.handle_exit(signal.SIGINT, None)

    def _take(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        task = loop.create_task(loop.connect_accepted_socket(self._protocol, connection))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


if __name__ == "__main__":
    main()
