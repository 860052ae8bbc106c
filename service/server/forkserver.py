"""The fork server: a process that has imported the server, and forks workers from itself.

Importing takes longer than everything else that a worker does before it answers. Done once, here,
it costs a replacement no time, and its memory is shared by all workers. This process has a single
thread when it forks, so no lock can be held by a thread that does not exist after the fork.

A worker is forked twice: the process in between ends at once, so the kernel makes the supervisor,
which is the subreaper, the worker's parent. The supervisor then learns of the worker's end.
"""

import gc
import logging
import os
import socket
import sys
from contextlib import suppress
from importlib import import_module

from service.engine.kernels import call_counts
from service.server import worker
from service.server.messages import LONGEST_REQUEST, WorkerConfig, WorkerRequest

logger = logging.getLogger(__name__)

# Modules that a server imports only when it starts or loads a bundle.
LATE_IMPORTS = (
    "service.engine.compiled",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
    "pydantic.v1",  # by FastAPI
)


def main() -> None:
    for name in LATE_IMPORTS:
        with suppress(ImportError):  # the worker that needs it will fail and say so
            import_module(name)
    call_counts.compiled_add_call()
    gc.collect()
    gc.freeze()  # a worker's collector would write to these objects, which copies their pages
    config = WorkerConfig.model_validate_json(sys.stdin.read())
    with socket.socket(fileno=int(sys.argv[1])) as supervisor:
        requested = serve_requests(supervisor)
    if requested is not None:
        worker.run(config, *requested)


def serve_requests(supervisor: socket.socket) -> tuple[WorkerRequest, socket.socket] | None:
    """Returns in each worker, with its request and its channel to the supervisor; in the fork
    server once the supervisor has ended, with None."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(supervisor, LONGEST_REQUEST, 1)
        if not message:
            return None
        for descriptor in descriptors:  # one, or none if this process has no free descriptor
            channel = socket.socket(fileno=descriptor)
            if _fork_worker():
                return WorkerRequest.model_validate_json(message), channel
            channel.close()


def _fork_worker() -> bool:
    """True in the worker, False in the fork server."""
    try:
        between = os.fork()
    except OSError as error:
        logger.error("No worker can be forked: %s.", error.strerror)
        return False
    if between:
        os.waitpid(between, 0)
        return False
    try:
        if not os.fork():
            return True
    except OSError as error:
        logger.error("No worker can be forked: %s.", error.strerror)
    os._exit(0)


if __name__ == "__main__":
    main()
