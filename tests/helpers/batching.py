"""A batcher with a fake engine, and requests that must wait for it."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import numpy as np
from helpers.fake_engine import FakeEngine, Recorder
from numpy.typing import NDArray

from service.batching.batcher import INLINE_SECONDS, Batcher
from service.batching.queue import QueueLimits
from service.batching.threads import EngineThreads
from service.engine import Engine
from service.topk import Answered, Mode

Request = tuple[NDArray[np.float32], int, int] | tuple[NDArray[np.float32], int, int, Mode]

LIMITS = QueueLimits(rows=100, bytes=10**6, seconds=1e9)

ALWAYS = 1e9  # seconds: the event loop computes whatever comes

NEVER = 0.0


def rows(*values: float) -> NDArray[np.float32]:
    return np.array([[value, 0.0] for value in values], np.float32)


@asynccontextmanager
async def batching(
    engine: FakeEngine | Engine,
    recorder: Recorder | None = None,
    limits: QueueLimits = LIMITS,
    max_batch_rows: int = 100,
    inline_seconds: float = INLINE_SECONDS,
    stuck_seconds: float = 60.0,
    max_batch_seconds: float = 1e9,  # no request is so long that it is sliced
) -> AsyncIterator[Batcher]:
    threads = EngineThreads.of(cpus=2)
    batcher = Batcher(
        engine,
        name="fake/1",
        observer=recorder or Recorder(),
        threads=threads,
        limits=limits,
        max_batch_rows=max_batch_rows,
        max_batch_seconds=max_batch_seconds,
        inline_seconds=inline_seconds,
        stuck_seconds=stuck_seconds,
    )
    try:
        yield batcher
    finally:
        await batcher.close()
        threads.close()


async def hold_first(batcher: Batcher, engine: FakeEngine) -> "asyncio.Task[Answered]":
    """Occupy the engine with a request of its own, so that the next ones must queue."""
    engine.hold()
    first = asyncio.create_task(batcher.topk(rows(1000), 1))
    await asyncio.to_thread(engine.entered.wait)
    return first


async def queue(batcher: Batcher, requests: Iterable[Request]) -> list["asyncio.Task[Answered]"]:
    tasks = [asyncio.create_task(batcher.topk(*request)) for request in requests]
    await asyncio.sleep(0)  # each task runs up to its wait
    return tasks
