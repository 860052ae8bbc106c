"""The messages between the supervisor, the fork server and the workers."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

# Worker to supervisor: it has started (with its process id); it takes connections; its event loop
# runs and it can answer; its event loop runs, but it has no model to answer with.
STARTED, READY, HEARTBEAT, HEARTBEAT_NO_MODEL = b"b", b"r", b"h", b"e"
# Supervisor to worker: take the connection that comes with it; stop as after SIGTERM, once no more
# connections come; no more come; stop as after SIGINT; stop at once.
CONNECTION, TERMINATE, FINISH, INTERRUPT, STOP_NOW = b"c", b"t", b"f", b"i", b"n"

HEARTBEAT_SECONDS = 0.25
LONGEST_REQUEST = 256  # bytes of a WorkerRequest


class WorkerConfig(BaseModel):
    """Supervisor to fork server, when it starts: what every worker is started with."""

    settings: dict[str, Any]
    folder: Path


class WorkerRequest(BaseModel):
    """Supervisor to fork server: fork a worker."""

    number: int
    replaces: bool  # a worker that died
