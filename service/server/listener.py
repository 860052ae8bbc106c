"""Listens, and deals new connections out to the workers in turn, so that each has equally many.

Left to the kernel, the workers' shares would be uneven by chance.
"""

import asyncio
import logging
import socket
from collections.abc import Iterator, Mapping

from service.server.messages import CONNECTION
from service.server.worker_process import WorkerProcess
from service.settings import Settings
from service.system import file_descriptors
from service.system.file_descriptors import RateLimited
from service.system.listening import accept_all, keep_out_new

logger = logging.getLogger(__name__)

BACKLOG = 2048
WORKERS_FULL_SECONDS = 0.01  # until the next attempt if no worker can take a connection
EXHAUSTED_SECONDS = 0.1  # until the next attempt if there is no file descriptor for a connection
UNRESPONSIVE_SECONDS = 1.5  # other workers are preferred to one that has been silent for so long


def listen(settings: Settings) -> Iterator[socket.socket]:
    """A listening socket for each address of the host."""
    found = socket.getaddrinfo(
        settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
        listening = socket.create_server(address, family=family, backlog=BACKLOG)
        listening.setblocking(False)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
        logger.info("Listening on %s port %d.", *listening.getsockname()[:2])
        yield listening


class Listener:
    def __init__(
        self, sockets: list[socket.socket], workers: Mapping[int, WorkerProcess], n_workers: int
    ) -> None:
        self._sockets = sockets
        self._workers = workers  # the supervisor's, by number
        self._n_workers = n_workers
        self._next = 0  # the number of the worker whose turn it is
        self._accept_errors = RateLimited()

    def start(self) -> None:
        """Accept connections, or accept them again after a pause."""
        for listening in self._sockets:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def pause(self) -> None:
        """Accept nothing; new connections wait in the kernel's backlog."""
        for listening in self._sockets:
            asyncio.get_running_loop().remove_reader(listening)

    def keep_out_new(self) -> None:
        """Have clients come in that are connecting, and no others."""
        for listening in self._sockets:
            keep_out_new(listening)

    def close(self) -> None:
        """Deal out who has connected; the kernel refuses new connections from now on."""
        self.pause()
        for listening in self._sockets:
            for connection in accept_all(listening):
                self.deal(connection)
            listening.close()
        self._sockets = []

    def deal(self, connection: socket.socket) -> None:
        """Send a connection to the next worker that can take it."""
        ready = [worker for worker in self._workers.values() if worker.ready]
        for worker in sorted(ready, key=self._preference):
            try:
                socket.send_fds(worker.channel, [CONNECTION], [connection.fileno()])
            except OSError:  # its channel is full, or it has just died
                continue
            self._next = worker.number + 1
            connection.close()
            return
        self.pause()
        asyncio.get_running_loop().call_later(WORKERS_FULL_SECONDS, self._deal_again, connection)

    def _preference(self, worker: WorkerProcess) -> tuple[bool, int]:
        unfit = not worker.has_model or worker.silent_seconds >= UNRESPONSIVE_SECONDS
        return unfit, (worker.number - self._next) % self._n_workers

    def _deal_again(self, connection: socket.socket) -> None:
        self.start()
        self.deal(connection)

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except OSError as error:
            if error.errno in file_descriptors.EXHAUSTED:
                self._wait_for_descriptors(error)
            return  # otherwise the client has left
        self.deal(connection)

    def _wait_for_descriptors(self, error: OSError) -> None:
        if self._accept_errors.allow():
            logger.error("Connections have to wait: %s.", error.strerror)
        self.pause()
        asyncio.get_running_loop().call_later(EXHAUSTED_SECONDS, self.start)
