"""The floor with natural batching: one thread asks the model for whatever has come meanwhile.

No timer: a request that finds the thread idle is computed at once.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import answers
from benchmarks.peers.floor import Receive, Send, answer, read, respond

Job = tuple[NDArray[np.float32], "asyncio.Future[bytes]"]  # rows [B,D] and who waits for them

waiting: list[Job] = []
running = False
thread = ThreadPoolExecutor(1)


async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    del scope
    hidden = answers.rows(await read(receive))
    loop = asyncio.get_running_loop()
    future: asyncio.Future[bytes] = loop.create_future()
    waiting.append((hidden, future))
    if not running:
        start(loop)
    await respond(send, await future)


def start(loop: asyncio.AbstractEventLoop) -> None:
    global running
    part = next(answers.parts(hidden for hidden, _ in waiting))
    futures = [future for _, future in waiting[: len(part)]]
    del waiting[: len(part)]
    running = True
    computing = loop.run_in_executor(thread, compute, part)
    computing.add_done_callback(lambda done: finish(loop, futures, done.result()))


def compute(part: list[NDArray[np.float32]]) -> list[bytes]:
    return [answers.joined(found) for found in answers.together(answer, part)]


def finish(
    loop: asyncio.AbstractEventLoop, futures: list["asyncio.Future[bytes]"], bodies: list[bytes]
) -> None:
    global running
    running = False
    if waiting:  # first, so that the model computes while answers are written
        start(loop)
    for future, body in zip(futures, bodies, strict=True):
        if not future.done():  # its client may have gone
            future.set_result(body)
