"""The asyncio client."""

import asyncio
from asyncio import sleep
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from service.client import address
from service.client.address import Verify
from service.client.answers import Answer
from service.client.async_connections import AsyncConnections
from service.client.core import Core, Pause, Send, Steps, Together, Version, reply_limits
from service.client.errors import ClientError
from service.client.http1 import DEFAULT_LIMITS, Reply
from service.client.model_info import ExpertInfo, ModelInfo

T = TypeVar("T")
# The server computes one part while the next arrives. More would wait in its queue, which refuses
# requests that would wait too long.
PARTS_AT_ONCE = 2


class AsyncClient:
    """Asks a server from one event loop. Its arguments are those of `Client`."""

    def __init__(
        self,
        url: str = "http://localhost:8000",
        model: str | None = None,
        version: Version | None = None,
        api_key: str | None = None,
        timeout: float = 10.0,
        retries: int = 4,
        verify: Verify = True,
        max_head_bytes: int = DEFAULT_LIMITS.head_bytes,
        max_body_bytes: int = DEFAULT_LIMITS.body_bytes,
    ) -> None:
        where = address.parse(url)
        limits = reply_limits(max_head_bytes, max_body_bytes)
        self._core = Core(
            where, model=model, version=version, api_key=api_key, timeout=timeout, retries=retries
        )
        self._connections = AsyncConnections(where, address.tls_context(where, verify), limits)

    async def topk(
        self,
        hidden: ArrayLike,
        k: int | None = 10,
        experts: int | None = None,
        model: str | None = None,
        version: Version | None = None,
        labels: bool = False,
        timeout: float | None = None,
        *,
        exact: bool = False,
        recall: float | None = None,
        rescore: bool = False,
    ) -> Answer:
        return await self._run(
            self._core.topk(
                hidden,
                k,
                experts,
                model,
                version,
                labels,
                timeout,
                exact=exact,
                recall=recall,
                rescore=rescore,
            )
        )

    async def models(self, timeout: float | None = None) -> list[ModelInfo]:
        return await self._run(self._core.models(timeout))

    async def model(self, name: str | None = None, timeout: float | None = None) -> ModelInfo:
        return await self._run(self._core.model(name, timeout))

    async def experts(
        self, name: str | None = None, timeout: float | None = None
    ) -> list[ExpertInfo]:
        return await self._run(self._core.experts(name, timeout))

    async def samples(
        self, name: str | None = None, timeout: float | None = None
    ) -> NDArray[np.float32]:
        return await self._run(self._core.samples(name, timeout))

    async def ready(self, timeout: float | None = None) -> bool:
        return await self._run(self._core.ready(timeout))

    async def close(self) -> None:
        await self._connections.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _run(self, steps: Steps[T]) -> T:
        outcome: object = None
        try:
            while True:
                step = steps.send(outcome)
                if isinstance(step, Send):
                    outcome = await self._send(step)
                elif isinstance(step, Pause):
                    await sleep(step.seconds)
                    outcome = None
                else:
                    outcome = await self._together(step)
        except StopIteration as done:
            result: T = done.value
            return result

    async def _send(self, step: Send) -> Reply | ClientError:
        try:
            return await self._connections.exchange(step.message, step.deadline, fresh=step.fresh)
        except ClientError as failure:
            return failure

    async def _together(self, step: Together) -> list[Answer]:
        room = asyncio.Semaphore(PARTS_AT_ONCE)

        async def one(part: Steps[Answer]) -> Answer:
            async with room:
                return await self._run(part)

        tasks = [asyncio.ensure_future(one(part)) for part in step.parts]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
