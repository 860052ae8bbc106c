"""How the supervisor has workers made, and becomes their parent. See `nursery.py`."""

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

from service.server.messages import Order, Orders

PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """The process that workers are forked from."""

    def __init__(self, orders: Orders) -> None:
        self.started = monotonic()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        with theirs, _in_memory(orders.model_dump_json()) as told:
            self.process = subprocess.Popen(  # noqa: S603
                # Wherever it is started: the package that this is, not one of that name nearby.
                [sys.executable, "-P", "-m", "service.server.forkserver", str(theirs.fileno())],
                # numpy's library would start threads, which a process that forks must not have.
                env={**os.environ, "PYTHONPATH": _import_path(), "OPENBLAS_NUM_THREADS": "1"},
                stdin=told,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the supervisor, which passes it on
            )

    def order(self, order: Order, channel: socket.socket) -> None:
        """If it has died, the channel is closed with it, which the supervisor notices."""
        with contextlib.suppress(OSError):
            told = order.model_dump_json().encode()
            socket.send_fds(self._channel, [told], [channel.fileno()])

    def end(self) -> None:
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)

    def buried(self, status: int) -> None:
        self._channel.close()
        self.process.returncode = status  # it need not be waited for again


def _in_memory(text: str) -> IO[bytes]:
    """A file that holds secrets must have no name, and a pipe would not hold it all."""
    file = os.fdopen(os.memfd_create("orders"), "r+b")
    file.write(text.encode())
    file.seek(0)
    return file


def adopt_orphans() -> None:
    """Become the parent of every process below whose own parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "Orphans cannot be adopted")


def _import_path() -> str:
    """For a process that shall import the same modules."""
    here = str(Path(__file__).parents[2])
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
