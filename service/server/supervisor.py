"""`dss serve --workers N`: a small process that starts N workers and keeps them running.

The supervisor listens and deals connections out to the workers (`listener.py`). A worker that dies,
or whose event loop is blocked, is replaced, after a pause that grows while that keeps happening.
SIGTERM and SIGINT are passed on and mean what they mean to one server; see `server.py`.

The supervisor imports nothing of the server, so it stays small: workers are forked from a process
of their own, the fork server (`forkserver.py`).
"""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

from service.errors import ModelsFolderMissing, NotStarted
from service.server.forkserver_client import ForkServer, become_subreaper
from service.server.listener import Listener, listen
from service.server.messages import (
    FINISH,
    HEARTBEAT,
    HEARTBEAT_NO_MODEL,
    INTERRUPT,
    READY,
    STARTED,
    STOP_NOW,
    TERMINATE,
    WorkerConfig,
    WorkerRequest,
)
from service.server.worker_process import WorkerProcess
from service.settings import WITH_SECRETS, Settings
from service.shared_state import folder as shared_folder
from service.shared_state.worker_table import WorkerTable
from service.system import cpu_quota, file_descriptors
from service.system.file_descriptors import RateLimited
from service.system.listening import CONNECTING_SECONDS
from service.telemetry import logging_setup

logger = logging.getLogger(__name__)

PAUSES = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # before a restart, by failed starts in a row
LASTING_SECONDS = 2.0  # a worker that was ready for so long has not failed to start
LATE_SECONDS = 5.0  # how late a worker may be in stopping before it is killed
CHECK_SECONDS = 0.5  # between checks of the workers' health
WATCHDOG_SECONDS = 1.0  # a worker's own watchdog notices so much earlier, if it can
START_SECONDS = 60.0  # from the fork of a worker until its event loop runs
RENEW_SECONDS = 1.0  # until a fork server that died is started again


def supervise(settings: Settings) -> None:
    if not settings.models.is_dir():
        raise ModelsFolderMissing(f"There is no models folder {settings.models}.")
    logging_setup.configure(settings)
    file_descriptors.raise_limit()
    logger.info("%s", cpu_quota.summary(settings.workers, settings.engine.threads))
    with ExitStack() as stack:
        try:
            sockets = [stack.enter_context(listening) for listening in listen(settings)]
        except OSError as error:
            logger.error("%s", error)
            raise _not_started(settings) from error
        folder = stack.enter_context(shared_folder.temporary(settings.workers_folder))
        asyncio.run(Supervisor(settings, folder, sockets).run())


def _not_started(settings: Settings) -> NotStarted:
    return NotStarted(f"The server could not start on {settings.host}:{settings.port}.")


class Supervisor:
    def __init__(self, settings: Settings, folder: Path, sockets: list[socket.socket]) -> None:
        self._settings = settings
        self._folder = folder
        self._config = WorkerConfig(
            settings=settings.model_dump(mode="json", context=WITH_SECRETS), folder=folder
        )
        self._fork_server: ForkServer | None = None
        self._workers: dict[int, WorkerProcess] = {}  # that run or are being started, by number
        self._listener = Listener(sockets, self._workers, settings.workers)
        self._unclaimed: dict[int, int] = {}  # statuses of processes that no worker has reported
        self._any_was_ready = False
        self._failed_starts = [0] * settings.workers  # of each worker, in a row
        self._restarts = 0
        self._stopping = False
        self._failed = False
        self._ended = asyncio.Event()
        self._table_outdated = False
        self._table_errors = RateLimited()

    async def run(self) -> None:
        """Until a signal has stopped every worker. Raises NotStarted if none can start."""
        loop = asyncio.get_running_loop()
        become_subreaper()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for passed_on in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(passed_on, self._stop, passed_on)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        loop.call_later(CHECK_SECONDS, self._check_health)
        try:
            for number in range(self._settings.workers):
                self._start(number, replaces=False)
            await self._ended.wait()
        finally:
            if self._fork_server is not None:
                self._fork_server.kill()
                self._fork_server.process.wait()
            for worker in self._workers.values():
                loop.remove_reader(worker.channel)
                worker.channel.close()
                worker.kill_and_wait()
        if self._failed:
            raise _not_started(self._settings)

    # --- starting workers, and what they report -----------------------------------------------

    def _start(self, number: int, *, replaces: bool) -> None:
        if self._fork_server is None:
            self._fork_server = ForkServer(self._config)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        worker = self._workers[number] = WorkerProcess(number, ours)
        asyncio.get_running_loop().add_reader(ours, self._receive, worker)
        with theirs:
            request = WorkerRequest(number=number, replaces=replaces)
            self._fork_server.request_worker(request, theirs)
        self._write_table()

    def _receive(self, worker: WorkerProcess) -> None:
        try:
            message = worker.channel.recv(64)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        worker.silent_seconds = 0.0
        if message in (HEARTBEAT, HEARTBEAT_NO_MODEL):
            worker.has_model = message == HEARTBEAT
            worker.max_silent_seconds = self._settings.stuck_seconds + WATCHDOG_SECONDS
        elif message == READY:
            worker.ready_since = monotonic()
            if not self._stopping:
                self._any_was_ready = True
                self._listener.start()
        elif message.startswith(STARTED):
            self._started(worker, int(message[len(STARTED) :]))
        else:
            self._channel_closed(worker)

    def _started(self, worker: WorkerProcess, process: int) -> None:
        worker.process, worker.max_silent_seconds = process, START_SECONDS
        status = self._unclaimed.pop(process, None)
        if status is not None:
            self._remove(worker, status)
        elif self._stopping:
            worker.kill()
        self._write_table()

    def _channel_closed(self, worker: WorkerProcess) -> None:
        """The worker is ending, or has ended."""
        asyncio.get_running_loop().remove_reader(worker.channel)
        worker.channel_open = False
        worker.max_silent_seconds = self._settings.stop_seconds + LATE_SECONDS
        if worker.process is None:  # it was not even forked
            self._remove(worker, None)

    def _reload(self) -> None:
        """Have keys and certificates read again. A worker that is still starting reads them."""
        for worker in self._workers.values():
            if worker.ready:
                worker.signal(signal.SIGHUP)

    # --- workers that end ---------------------------------------------------------------------

    def _reap(self) -> None:
        """Wait for every process that has ended, also for orphans, which process 1 must reap."""
        with contextlib.suppress(ChildProcessError):  # none is left
            while True:
                process, encoded = os.waitpid(-1, os.WNOHANG)
                if not process:
                    break
                self._reaped(process, os.waitstatus_to_exitcode(encoded))

    def _reaped(self, process: int, status: int) -> None:
        if self._fork_server is not None and self._fork_server.process.pid == process:
            self._fork_server_ended(self._fork_server, status)
            return
        for worker in self._workers.values():
            if worker.process == process:
                self._remove(worker, status)
                return
        if any(worker.process is None for worker in self._workers.values()):
            self._unclaimed[process] = status
        else:  # it was no worker
            self._unclaimed.clear()

    def _fork_server_ended(self, ended: ForkServer, status: int) -> None:
        ended.reaped(status)
        self._fork_server = None
        self._write_table()
        if self._stopping:
            return
        logger.error("The fork server ended with status %d.", status)
        if monotonic() - ended.started > START_SECONDS:  # otherwise when a worker is to be started
            asyncio.get_running_loop().call_later(RENEW_SECONDS, self._renew_fork_server)

    def _renew_fork_server(self) -> None:
        if self._fork_server is None and not self._stopping:
            with contextlib.suppress(OSError):
                self._fork_server = ForkServer(self._config)
            self._write_table()

    def _remove(self, worker: WorkerProcess, status: int | None) -> None:
        asyncio.get_running_loop().remove_reader(worker.channel)
        worker.channel.close()
        del self._workers[worker.number]
        self._write_table()
        if not self._stopping:
            self._handle_loss(worker, status)
        elif not self._workers:
            self._ended.set()

    def _handle_loss(self, worker: WorkerProcess, status: int | None) -> None:
        reason = "could not be started" if status is None else f"ended with status {status}"
        if not self._any_was_ready:  # the others would fail as well
            logger.error("Worker %d %s.", worker.number, reason)
            self._failed = True
            self._ended.set()
            return
        if worker.ready_since and monotonic() - worker.ready_since > LASTING_SECONDS:
            self._failed_starts[worker.number] = 0
        self._replace_later(worker.number, reason)

    def _replace_later(self, number: int, reason: str) -> None:
        pause = PAUSES[min(self._failed_starts[number], len(PAUSES) - 1)]
        self._failed_starts[number] += 1
        logger.error("Worker %d %s; another starts in %g s.", number, reason, pause)
        asyncio.get_running_loop().call_later(pause, self._replace, number)

    def _replace(self, number: int) -> None:
        if self._stopping:
            return
        try:
            self._start(number, replaces=True)
        except OSError as error:
            self._replace_later(number, f"cannot be started ({error.strerror})")
        else:
            self._restarts += 1

    # --- health -------------------------------------------------------------------------------

    def _check_health(self) -> None:
        """Kill workers that have been silent too long.

        Silence is counted in checks, not read from a clock: while this process was stopped itself,
        it received nothing, and no worker is to blame for that.
        """
        for worker in self._workers.values():
            worker.silent_seconds += CHECK_SECONDS
            if worker.silent_seconds <= worker.max_silent_seconds:
                continue
            logger.error(
                "Worker %d has been silent for %g s and is killed.",
                worker.number,
                worker.max_silent_seconds,
            )
            if worker.process is not None:
                worker.kill()
            elif self._fork_server is not None:
                self._fork_server.kill()
        if self._table_outdated:
            self._write_table()
        asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check_health)

    def _write_table(self) -> None:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        processes = {worker.number: worker.process for worker in self._workers.values()}
        try:
            WorkerTable(
                workers={number: process for number, process in processes.items() if process},
                supervisor=os.getpid(),
                fork_server=self._fork_server.process.pid if self._fork_server else None,
                restarts=self._restarts,
                ended_cpu_seconds=ended.ru_utime + ended.ru_stime,
            ).write(self._folder)
            self._table_outdated = False
        except OSError as error:  # until it can be written, /metrics shows the previous table
            self._table_outdated = True
            if self._table_errors.allow():
                logger.error("%s cannot be written to: %s.", self._folder, error.strerror)

    # --- stopping -----------------------------------------------------------------------------

    def _stop(self, received: signal.Signals) -> None:
        loop = asyncio.get_running_loop()
        again = self._stopping
        if again:
            self._listener.close()
            loop.call_later(LATE_SECONDS, self._kill_all)
        else:
            self._stopping = True
            if self._fork_server is not None:
                self._fork_server.kill()
            drain = self._settings.drain_seconds if received == signal.SIGTERM else 0.0
            loop.call_later(drain, self._listener.keep_out_new)
            loop.call_later(drain + CONNECTING_SECONDS, self._stop_listening)
            loop.call_later(drain + self._settings.stop_seconds + LATE_SECONDS, self._kill_all)
        for worker in self._workers.values():
            if worker.ready_since is None:  # it has no connection to finish
                worker.kill()
            else:
                self._stop_worker(worker, received, at_once=again)
        if not self._workers:
            self._ended.set()

    def _stop_listening(self) -> None:
        self._listener.close()
        for worker in self._workers.values():
            with contextlib.suppress(OSError):  # it is ending, or will not wait for ever
                worker.channel.send(FINISH)

    def _stop_worker(
        self, worker: WorkerProcess, received: signal.Signals, *, at_once: bool
    ) -> None:
        """By a message: the workers may have received the signal too, and a second would end them
        at once."""
        message = STOP_NOW if at_once else TERMINATE if received == signal.SIGTERM else INTERRUPT
        try:
            worker.channel.send(message)
        except OSError:  # closed, since the worker is ending, or full
            worker.signal(received)

    def _kill_all(self) -> None:
        for worker in self._workers.values():
            logger.error("Worker %d does not stop and is killed.", worker.number)
            worker.kill()
