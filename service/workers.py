"""`dss serve --workers N`: a small process that starts N others and keeps them running.

It listens, and deals connections out to the workers in turn, so that each has as many as the next
one; left to the kernel, shares are uneven by chance. A worker that dies is replaced, after a pause
that grows while it keeps dying. SIGTERM and SIGINT are passed on and mean what they mean to one
server; see `server.py`.

Nothing of the server is imported here: a worker is a fresh process, and this one stays small.
"""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from pydantic import BaseModel

from service import logs
from service.errors import ModelsFolderMissing, NotStarted
from service.roster import Roster
from service.settings import Settings

logger = logging.getLogger(__name__)

BACKLOG = 2048
READY = b"r"  # what a worker says when it takes connections
CONNECTION = b"c"  # what comes with each
PAUSES = (0.1, 1.0, 2.0, 5.0, 10.0, 30.0)  # before a start, by how many before it were in vain
LONG_LIFE_SECONDS = 60.0  # a worker that lived so long was not started in vain
ROOM_SECONDS = 0.01  # when to try again if no worker has room for a connection
LATE_SECONDS = 5.0  # how late a worker may be in stopping before it is killed


class Orders(BaseModel):
    """What a worker reads when it starts."""

    settings: dict[str, Any]
    number: int
    folder: Path
    channel: int  # a file descriptor
    replaces: bool  # a worker that died


@dataclass(eq=False)
class Worker:
    number: int
    process: "subprocess.Popen[bytes]"
    channel: socket.socket
    started: float = field(default_factory=monotonic)
    ready: bool = False


def supervise(settings: Settings) -> None:
    if not settings.models.is_dir():
        raise ModelsFolderMissing(f"There is no models folder {settings.models}.")
    logs.configure(settings)
    with ExitStack() as stack:
        try:
            listeners = [stack.enter_context(made) for made in listen(settings)]
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dss-")))
        except OSError as error:
            logger.error("%s", error)
            raise _not_started(settings) from error
        asyncio.run(Supervisor(settings, folder, listeners).run())


def listen(settings: Settings) -> Iterator[socket.socket]:
    """A listening socket for each address of the host."""
    found = socket.getaddrinfo(
        settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
        made = socket.create_server(address, family=family, backlog=BACKLOG)
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
        logger.info("Listening on %s port %d.", *made.getsockname()[:2])
        yield made


def _not_started(settings: Settings) -> NotStarted:
    return NotStarted(f"The server could not start on {settings.host}:{settings.port}.")


class Supervisor:
    def __init__(self, settings: Settings, folder: Path, listeners: list[socket.socket]) -> None:
        self._settings = settings
        self._folder = folder
        self._listeners = listeners
        self._workers: dict[int, Worker] = {}  # those that run
        self._turn = 0  # which worker gets the next connection
        self._proven = False  # some worker has been ready
        self._vain = [0] * settings.workers  # starts of each that did not last, in a row
        self._restarts = 0
        self._stopping = False
        self._failed = False
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Until a signal has stopped every worker. Raises NotStarted if none can start."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._bury)
        for passed_on in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(passed_on, self._stop, passed_on)
        try:
            for number in range(self._settings.workers):
                self._start(number, replaces=False)
            await self._ended.wait()
        finally:
            for worker in self._workers.values():
                worker.channel.close()
                worker.process.kill()
                worker.process.wait()
        if self._failed:
            raise _not_started(self._settings)

    # --- workers ------------------------------------------------------------------------------

    def _start(self, number: int, *, replaces: bool) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            process = subprocess.Popen(
                # Wherever it is started: the package that this is, not one of that name nearby.
                [sys.executable, "-P", "-m", "service.worker"],
                env={**os.environ, "PYTHONPATH": _import_path()},
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the supervisor, which passes it on
            )
            orders = Orders(
                settings=self._settings.model_dump(mode="json"),
                number=number,
                folder=self._folder,
                channel=theirs.fileno(),
                replaces=replaces,
            )
        assert process.stdin is not None  # noqa: S101
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(orders.model_dump_json().encode())
        worker = self._workers[number] = Worker(number, process, ours)
        asyncio.get_running_loop().add_reader(ours, self._hear, worker)
        self._write_roster()

    def _hear(self, worker: Worker) -> None:
        """A worker takes connections from now on, or no longer."""
        try:
            worker.ready = worker.channel.recv(1) == READY
        except OSError:
            worker.ready = False
        if not worker.ready:
            asyncio.get_running_loop().remove_reader(worker.channel)
        elif not self._stopping:
            self._proven = True
            self._accept()

    def _bury(self) -> None:
        """Some worker has ended."""
        for worker in list(self._workers.values()):
            if worker.process.poll() is None:
                continue
            asyncio.get_running_loop().remove_reader(worker.channel)
            worker.channel.close()
            del self._workers[worker.number]
            self._write_roster()
            if not self._stopping:
                self._lost(worker)
        if self._stopping and not self._workers:
            self._ended.set()

    def _lost(self, worker: Worker) -> None:
        status = worker.process.returncode
        if not self._proven:  # the others would fail as well
            logger.error("Worker %d ended with status %d.", worker.number, status)
            self._failed = True
            self._ended.set()
            return
        if monotonic() - worker.started > LONG_LIFE_SECONDS:
            self._vain[worker.number] = 0
        pause = PAUSES[min(self._vain[worker.number], len(PAUSES) - 1)]
        self._vain[worker.number] += 1
        logger.error(
            "Worker %d ended with status %d; another starts in %g s.",
            worker.number,
            status,
            pause,
        )
        asyncio.get_running_loop().call_later(pause, self._replace, worker.number)

    def _replace(self, number: int) -> None:
        if not self._stopping:
            self._restarts += 1
            self._start(number, replaces=True)

    def _write_roster(self) -> None:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        Roster(
            workers={worker.number: worker.process.pid for worker in self._workers.values()},
            supervisor=os.getpid(),
            restarts=self._restarts,
            ended_cpu_seconds=ended.ru_utime + ended.ru_stime,
        ).write(self._folder)

    # --- connections --------------------------------------------------------------------------

    def _accept(self) -> None:
        for listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener, self._deal, listener)

    def _hold(self) -> None:
        """Accept nothing; the system keeps new connections waiting."""
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)

    def _close(self) -> None:
        """Let the system refuse new connections."""
        self._hold()
        for listener in self._listeners:
            listener.close()
        self._listeners = []

    def _deal(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # the client has left, or no descriptor is free
            return
        self._hand_out(connection)

    def _hand_out(self, connection: socket.socket) -> None:
        ready = [worker for worker in self._workers.values() if worker.ready]
        for worker in sorted(ready, key=self._turns_to):
            try:
                socket.send_fds(worker.channel, [CONNECTION], [connection.fileno()])
            except OSError:  # it has no room now, or has just died
                continue
            self._turn = worker.number + 1
            connection.close()
            return
        self._hold()
        asyncio.get_running_loop().call_later(ROOM_SECONDS, self._again, connection)

    def _turns_to(self, worker: Worker) -> int:
        return (worker.number - self._turn) % self._settings.workers

    def _again(self, connection: socket.socket) -> None:
        self._accept()
        self._hand_out(connection)

    # --- the end ------------------------------------------------------------------------------

    def _stop(self, asked: signal.Signals) -> None:
        loop = asyncio.get_running_loop()
        if self._stopping:
            self._close()
            loop.call_later(LATE_SECONDS, self._kill)
        else:
            self._stopping = True
            drain = self._settings.drain_seconds if asked == signal.SIGTERM else 0.0
            loop.call_later(drain, self._close)
            loop.call_later(drain + self._settings.stop_seconds + LATE_SECONDS, self._kill)
        for worker in self._workers.values():
            if worker.ready:
                worker.process.send_signal(asked)
            else:  # it has no connection to finish
                worker.process.kill()
        if not self._workers:
            self._ended.set()

    def _kill(self) -> None:
        for worker in self._workers.values():
            logger.error("Worker %d does not stop and is killed.", worker.number)
            worker.process.kill()


def _import_path() -> str:
    """For a process that shall import the same modules."""
    here = str(Path(__file__).parent.parent)
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
