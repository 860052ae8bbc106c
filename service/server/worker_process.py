"""One worker, as the supervisor sees it."""

import os
import signal
import socket
from dataclasses import dataclass

FORK_SECONDS = 600.0  # how long forking a worker may take: kernels may have to be compiled first


@dataclass(eq=False)
class WorkerProcess:
    number: int
    channel: socket.socket
    process: int | None = None  # its id, once it has reported it
    ready_since: float | None = None
    channel_open: bool = True
    has_model: bool = True  # it has a model to answer with
    silent_seconds: float = 0.0  # since its last message, as counted by the supervisor's checks
    max_silent_seconds: float = FORK_SECONDS

    @property
    def ready(self) -> bool:
        return self.channel_open and self.ready_since is not None

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            os.kill(self.process, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def kill_and_wait(self) -> None:
        self.kill()
        if self.process is not None:
            os.waitpid(self.process, 0)
