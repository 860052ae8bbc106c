"""Where workers come from: a process that has imported the server, and forks.

Importing takes longer than everything else that a worker does before it answers. Done once, here,
it costs a dead worker's heir nothing, and what it leaves in memory is shared by all. This process
has one thread when it forks, so no lock can be held by a thread that the fork leaves behind.

A worker is made in two steps, so that it becomes the child of the supervisor, who then hears of its
end: a process whose parent has ended is given to the next one above that asked for such orphans.
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
from service.server.messages import LONGEST_ORDER, Order, Orders

logger = logging.getLogger(__name__)

# What a server imports late, when it starts or loads a bundle.
LATE = (
    "service.engine.compiled",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
    "pydantic.v1",  # by FastAPI
)


def main() -> None:
    for name in LATE:
        with suppress(ImportError):  # whoever needs it will say so
            import_module(name)
    call_counts.compiled_tally()
    gc.collect()
    gc.freeze()  # a worker's collector would write to what it looks at, and so make it private
    orders = Orders.model_validate_json(sys.stdin.read())
    with socket.socket(fileno=int(sys.argv[1])) as supervisor:
        born = await_birth(supervisor)
    if born is not None:
        worker.run(orders, *born)


def await_birth(supervisor: socket.socket) -> tuple[Order, socket.socket] | None:
    """In each worker: what to do, and its channel. Here: nothing, once the supervisor has gone."""
    while True:
        said, descriptors, _, _ = socket.recv_fds(supervisor, LONGEST_ORDER, 1)
        if not said:
            return None
        for descriptor in descriptors:  # one, or none if no more can be open
            channel = socket.socket(fileno=descriptor)
            if _in_the_worker():
                return Order.model_validate_json(said), channel
            channel.close()


def _in_the_worker() -> bool:
    """True in a new process, whose parent is not this one. If there can be none: False here."""
    try:
        between = os.fork()
    except OSError as error:
        logger.error("No worker can be made: %s.", error.strerror)
        return False
    if between:
        os.waitpid(between, 0)
        return False
    try:
        if not os.fork():
            return True
    except OSError as error:
        logger.error("No worker can be made: %s.", error.strerror)
    os._exit(0)


if __name__ == "__main__":
    main()
