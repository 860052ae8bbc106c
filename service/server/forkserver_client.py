"""Starts the fork server (`forkserver.py`) and requests workers from it."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import IO

from service.server.messages import WorkerConfig, WorkerRequest

PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """The fork server's process, as the supervisor sees it."""

    def __init__(self, config: WorkerConfig) -> None:
        self.started = monotonic()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        with theirs, _memory_file(config.model_dump_json()) as config_file:
            self.process = subprocess.Popen(  # noqa: S603
                # -P: this very package, not one of the same name in the working directory.
                [sys.executable, "-P", "-m", "service.server.forkserver", str(theirs.fileno())],
                # OpenBLAS would start threads, which a process that forks must not have.
                env={**os.environ, "PYTHONPATH": _import_path(), "OPENBLAS_NUM_THREADS": "1"},
                stdin=config_file,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the supervisor, which passes it on
            )

    def request_worker(self, request: WorkerRequest, channel: socket.socket) -> None:
        """If the fork server has died, the channel closes, which the supervisor notices."""
        with contextlib.suppress(OSError):
            message = request.model_dump_json().encode()
            socket.send_fds(self._channel, [message], [channel.fileno()])

    def kill(self) -> None:
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)

    def reaped(self, status: int) -> None:
        """The supervisor has already waited for the process."""
        self._channel.close()
        self.process.returncode = status


def _memory_file(text: str) -> IO[bytes]:
    """The settings hold secrets, so the file has no name; a pipe could be too small for them."""
    file = os.fdopen(os.memfd_create("config"), "r+b")
    file.write(text.encode())
    file.seek(0)
    return file


def become_subreaper() -> None:
    """Become the parent of every descendant whose own parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "This process cannot become a subreaper")


def _import_path() -> str:
    """PYTHONPATH for a process that shall import the same modules."""
    here = str(Path(__file__).parents[2])
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
