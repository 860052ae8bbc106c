"""`dss serve --workers N`: a small process that starts N others and keeps them running.

It listens, and deals connections out to the workers in turn, so that each has as many as the next
one; left to the kernel, shares are uneven by chance. A worker that dies, or whose event loop stands
still, is replaced, after a pause that grows while that keeps happening. SIGTERM and SIGINT are
passed on and mean what they mean to one server; see `server.py`.

Nothing of the server is imported here: workers are forked from a process of their own
(`nursery.py`), and this one stays small.
"""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from service.errors import ModelsFolderMissing, NotStarted
from service.server.forkserver_client import ForkServer, adopt_orphans
from service.server.messages import (
    AT_ONCE,
    BEAT,
    BORN,
    CONNECTION,
    EMPTY_BEAT,
    INTERRUPT,
    READY,
    TERMINATE,
    Order,
    Orders,
)
from service.settings import WITH_SECRETS, Settings
from service.shared_state import folder as shared_folder
from service.shared_state.worker_table import WorkerTable
from service.system import cpu_quota, file_descriptors
from service.system.file_descriptors import RateLimited
from service.telemetry import logging_setup

logger = logging.getLogger(__name__)

BACKLOG = 2048
PAUSES = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # before a start, by how many before were in vain
LONG_LIFE_SECONDS = 2.0  # a worker that served so long was not started in vain
ROOM_SECONDS = 0.01  # when to try again if no worker has room for a connection
EXHAUSTED_SECONDS = 0.1  # ... and if there is no descriptor for it
LATE_SECONDS = 5.0  # how late a worker may be in stopping before it is killed
ROUND_SECONDS = 0.5  # how often silence is looked at
STALE_SECONDS = 1.5  # others are preferred to a worker that has been silent for so long
WATCHDOG_SECONDS = 1.0  # by how much a worker is the first to notice, if it can (`watchdog.py`)
BIRTH_SECONDS = 600.0  # how long it may take to fork a worker: loops may have to be compiled first
START_SECONDS = 60.0  # ... and then until its event loop turns


@dataclass(eq=False)
class Worker:
    number: int
    channel: socket.socket
    process: int | None = None  # until it is known
    ready_since: float | None = None
    open: bool = True  # it can be spoken to
    empty: bool = False  # it has no model to answer with
    silent: float = 0.0  # seconds, as this process has seen them pass
    patience: float = BIRTH_SECONDS  # how long it may be silent

    @property
    def ready(self) -> bool:
        return self.open and self.ready_since is not None

    def kill(self) -> None:
        if self.process is not None:
            os.kill(self.process, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        if self.process is not None:
            os.waitpid(self.process, 0)


def supervise(settings: Settings) -> None:
    if not settings.models.is_dir():
        raise ModelsFolderMissing(f"There is no models folder {settings.models}.")
    logging_setup.configure(settings)
    file_descriptors.raise_limit()
    logger.info("%s", cpu_quota.summary(settings.workers, settings.engine.threads))
    with ExitStack() as stack:
        try:
            listeners = [stack.enter_context(made) for made in listen(settings)]
        except OSError as error:
            logger.error("%s", error)
            raise _not_started(settings) from error
        folder = stack.enter_context(shared_folder.temporary(settings.workers_folder))
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
        self._orders = Orders(
            settings=settings.model_dump(mode="json", context=WITH_SECRETS), folder=folder
        )
        self._listeners = listeners
        self._nursery: ForkServer | None = None
        self._workers: dict[int, Worker] = {}  # those that run, or soon will
        self._unknown: dict[int, int] = {}  # processes that ended before they said who they are
        self._turn = 0  # which worker gets the next connection
        self._proven = False  # some worker has been ready
        self._vain = [0] * settings.workers  # starts of each that did not last, in a row
        self._restarts = 0
        self._stopping = False
        self._failed = False
        self._ended = asyncio.Event()
        self._roster_stale = False
        self._roster_trouble, self._accept_trouble = RateLimited(), RateLimited()

    async def run(self) -> None:
        """Until a signal has stopped every worker. Raises NotStarted if none can start."""
        loop = asyncio.get_running_loop()
        adopt_orphans()
        loop.add_signal_handler(signal.SIGCHLD, self._bury)
        for passed_on in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(passed_on, self._stop, passed_on)
        loop.add_signal_handler(signal.SIGHUP, self._read_again)
        loop.call_later(ROUND_SECONDS, self._look_round)
        try:
            for number in range(self._settings.workers):
                self._start(number, replaces=False)
            await self._ended.wait()
        finally:
            if self._nursery is not None:
                self._nursery.end()
                self._nursery.process.wait()
            for worker in self._workers.values():
                loop.remove_reader(worker.channel)
                worker.channel.close()
                worker.end()
        if self._failed:
            raise _not_started(self._settings)

    # --- workers ------------------------------------------------------------------------------

    def _start(self, number: int, *, replaces: bool) -> None:
        if self._nursery is None:
            self._nursery = ForkServer(self._orders)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        worker = self._workers[number] = Worker(number, ours)
        asyncio.get_running_loop().add_reader(ours, self._hear, worker)
        with theirs:
            self._nursery.order(Order(number=number, replaces=replaces), theirs)
        self._write_roster()

    def _read_again(self) -> None:
        """Keys and certificates. A worker that is still starting reads them anyway."""
        for worker in self._workers.values():
            if worker.ready and worker.process is not None:
                os.kill(worker.process, signal.SIGHUP)

    def _hear(self, worker: Worker) -> None:
        try:
            said = worker.channel.recv(64)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        worker.silent = 0.0
        if said in (BEAT, EMPTY_BEAT):
            worker.empty = said == EMPTY_BEAT
            worker.patience = self._settings.stuck_seconds + WATCHDOG_SECONDS
        elif said == READY:
            worker.ready_since = monotonic()
            if not self._stopping:
                self._proven = True
                self._accept()
        elif said.startswith(BORN):
            self._born(worker, int(said[len(BORN) :]))
        else:
            self._fell_silent(worker)

    def _born(self, worker: Worker, process: int) -> None:
        worker.process, worker.patience = process, START_SECONDS
        status = self._unknown.pop(process, None)
        if status is not None:
            self._gone(worker, status)
        elif self._stopping:
            worker.kill()
        self._write_roster()

    def _fell_silent(self, worker: Worker) -> None:
        """It has closed its channel: it ends, by itself or as it was told to, or has done so."""
        asyncio.get_running_loop().remove_reader(worker.channel)
        worker.open = False
        worker.patience = self._settings.stop_seconds + LATE_SECONDS
        if worker.process is None:  # it was never born
            self._gone(worker, None)

    def _bury(self) -> None:
        """Some process has ended: a worker, or an orphan, of which process 1 must take care."""
        with contextlib.suppress(ChildProcessError):  # none is left
            while True:
                process, encoded = os.waitpid(-1, os.WNOHANG)
                if not process:
                    break
                self._buried(process, os.waitstatus_to_exitcode(encoded))

    def _buried(self, process: int, status: int) -> None:
        if self._nursery is not None and self._nursery.process.pid == process:
            self._nursery_lost(self._nursery, status)
            return
        for worker in self._workers.values():
            if worker.process == process:
                self._gone(worker, status)
                return
        if any(worker.process is None for worker in self._workers.values()):
            self._unknown[process] = status
        else:  # somebody's orphan
            self._unknown.clear()

    def _nursery_lost(self, nursery: ForkServer, status: int) -> None:
        nursery.buried(status)
        self._nursery = None
        self._write_roster()
        if self._stopping:
            return
        logger.error("The process that workers are forked from ended with status %d.", status)
        if monotonic() - nursery.started > START_SECONDS:  # or else when it is needed
            asyncio.get_running_loop().call_later(PAUSES[2], self._renew_nursery)

    def _renew_nursery(self) -> None:
        if self._nursery is None and not self._stopping:
            with contextlib.suppress(OSError):
                self._nursery = ForkServer(self._orders)
            self._write_roster()

    def _gone(self, worker: Worker, status: int | None) -> None:
        asyncio.get_running_loop().remove_reader(worker.channel)
        worker.channel.close()
        del self._workers[worker.number]
        self._write_roster()
        if not self._stopping:
            self._lost(worker, status)
        elif not self._workers:
            self._ended.set()

    def _lost(self, worker: Worker, status: int | None) -> None:
        said = "could not be made" if status is None else f"ended with status {status}"
        if not self._proven:  # the others would fail as well
            logger.error("Worker %d %s.", worker.number, said)
            self._failed = True
            self._ended.set()
            return
        if worker.ready_since and monotonic() - worker.ready_since > LONG_LIFE_SECONDS:
            self._vain[worker.number] = 0
        self._replace_soon(worker.number, said)

    def _replace_soon(self, number: int, why: str) -> None:
        pause = PAUSES[min(self._vain[number], len(PAUSES) - 1)]
        self._vain[number] += 1
        logger.error("Worker %d %s; another starts in %g s.", number, why, pause)
        asyncio.get_running_loop().call_later(pause, self._replace, number)

    def _replace(self, number: int) -> None:
        if self._stopping:
            return
        try:
            self._start(number, replaces=True)
        except OSError as error:
            self._replace_soon(number, f"cannot be started ({error.strerror})")
        else:
            self._restarts += 1

    def _look_round(self) -> None:
        """Kill workers that have been silent too long.

        Time is counted in rounds of this loop, not read from a clock: if this process was held up
        itself, it has heard nobody, and that is nobody's fault.
        """
        for worker in self._workers.values():
            worker.silent += ROUND_SECONDS
            if worker.silent <= worker.patience:
                continue
            logger.error(
                "Worker %d has been silent for %g s and is killed.", worker.number, worker.patience
            )
            if worker.process is not None:
                worker.kill()
            elif self._nursery is not None:
                self._nursery.end()
        if self._roster_stale:
            self._write_roster()
        asyncio.get_running_loop().call_later(ROUND_SECONDS, self._look_round)

    def _write_roster(self) -> None:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        known = {worker.number: worker.process for worker in self._workers.values()}
        try:
            WorkerTable(
                workers={number: process for number, process in known.items() if process},
                supervisor=os.getpid(),
                fork_server=self._nursery.process.pid if self._nursery else None,
                restarts=self._restarts,
                ended_cpu_seconds=ended.ru_utime + ended.ru_stime,
            ).write(self._folder)
            self._roster_stale = False
        except OSError as error:  # /metrics shows what was so before
            self._roster_stale = True
            if self._roster_trouble.allow():
                logger.error("%s cannot be written to: %s.", self._folder, error.strerror)

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
        except OSError as error:
            if error.errno in file_descriptors.EXHAUSTED:
                self._wait_for_descriptors(error)
            return  # or else the client has left
        self._hand_out(connection)

    def _wait_for_descriptors(self, error: OSError) -> None:
        if self._accept_trouble.allow():
            logger.error("Connections have to wait: %s.", error.strerror)
        self._hold()
        asyncio.get_running_loop().call_later(EXHAUSTED_SECONDS, self._accept)

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

    def _turns_to(self, worker: Worker) -> tuple[bool, int]:
        poor = worker.empty or worker.silent >= STALE_SECONDS
        return poor, (worker.number - self._turn) % self._settings.workers

    def _again(self, connection: socket.socket) -> None:
        self._accept()
        self._hand_out(connection)

    # --- the end ------------------------------------------------------------------------------

    def _stop(self, asked: signal.Signals) -> None:
        loop = asyncio.get_running_loop()
        again = self._stopping
        if again:
            self._close()
            loop.call_later(LATE_SECONDS, self._kill)
        else:
            self._stopping = True
            if self._nursery is not None:
                self._nursery.end()
            drain = self._settings.drain_seconds if asked == signal.SIGTERM else 0.0
            loop.call_later(drain, self._close)
            loop.call_later(drain + self._settings.stop_seconds + LATE_SECONDS, self._kill)
        for worker in self._workers.values():
            if worker.ready_since is None:  # it has no connection to finish
                worker.kill()
            else:
                self._tell_to_stop(worker, asked, at_once=again)
        if not self._workers:
            self._ended.set()

    def _tell_to_stop(self, worker: Worker, asked: signal.Signals, *, at_once: bool) -> None:
        """By the channel: a signal may have reached the workers too, and a second one is rude."""
        order = AT_ONCE if at_once else TERMINATE if asked == signal.SIGTERM else INTERRUPT
        try:
            worker.channel.send(order)
        except OSError:  # closed, since it is ending, or full
            if worker.process is not None:
                os.kill(worker.process, asked)

    def _kill(self) -> None:
        for worker in self._workers.values():
            logger.error("Worker %d does not stop and is killed.", worker.number)
            worker.kill()
