"""This project's client beside tritonclient, httpx and httpcore, which all ask for the same top 10
and have numpy arrays in the end. httpx and httpcore are asked as plainly as they can be.
"""

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import httpcore
import httpx
import tritonclient.http as triton
from tritonclient.http import aio

from benchmarks.client.turns import (
    AT_ONCE,
    BUNDLE,
    Ask,
    AsyncAsk,
    Contest,
    Contestant,
    K,
    Rows,
    by_tasks,
    by_threads,
    measured,
    one_by_one,
)
from service.bench import server
from service.bench.target import Server
from service.client import AsyncClient, Client, answers
from service.client.http1 import Reply
from service.client.rows import body

PATH = f"/models/demo/versions/1/topk?k={K}&experts=1"
PARAMETERS = {"k": K, "experts": 1}
OUTPUTS = ("classes", "log_probs", "experts", "gates")
HEADERS = {"Content-Type": answers.NPY, "Accept": answers.NPY, "DSS-Timeout": "10"}
TIMEOUTS = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), 10.0)}
TRITONCLIENT = 1  # its place in each contest


def compare(rounds: int, calls: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    with server.started(BUNDLE, workers=None) as where, asyncio.Runner() as runner:
        for clients in (Blocking(where), Asynchronous(where, runner)):
            for contest in clients.contests():
                for size in sizes:
                    points += measured(contest, size, rounds, calls)
            clients.close()
    return points


def tensors(rows: Rows) -> list[Any]:
    hidden = triton.InferInput("hidden", list(rows.shape), "FP32")
    hidden.set_data_from_numpy(rows)
    return [hidden]


def arrays(result: Any) -> list[Any]:  # noqa: ANN401
    return [result.as_numpy(name) for name in OUTPUTS]


def read(reply: Any, rows: Rows) -> object:  # noqa: ANN401
    """The answer in a response of httpcore or httpx."""
    status = getattr(reply, "status_code", None) or reply.status
    headers = reply.headers.raw if isinstance(reply.headers, httpx.Headers) else reply.headers
    named = {name.lower(): value for name, value in headers}
    return answers.read(Reply(status, named, reply.content, True), len(rows), named=False)


def core_request(where: Server, rows: Rows) -> dict[str, Any]:
    content = b"".join(body(rows))
    headers = {"Host": f"{where.host}:{where.port}", **HEADERS, "Content-Length": str(len(content))}
    url = _core_url(where.url)
    return {"url": url, "headers": headers, "content": content, "extensions": TIMEOUTS}


@cache
def _core_url(base: str) -> httpcore.URL:
    return httpcore.URL(base + PATH)


class Blocking:
    def __init__(self, where: Server) -> None:
        self._where = where
        self._ours = Client(where.url, model="demo", version=1)
        self._core = httpcore.ConnectionPool()
        self._httpx = httpx.Client()

    def contests(self) -> list[Contest]:
        alone = {
            "Client": self._ask,
            "tritonclient.http": self._theirs(),
            "httpcore": self._ask_core,
            "httpx": self._ask_httpx,
        }
        # A client of tritonclient must not be shared by threads, so each thread makes its own.
        shared = {"Client": lambda: self._ask, "tritonclient.http": self._theirs}
        return [
            Contest(
                1, [Contestant(name, one_by_one(ask)) for name, ask in alone.items()], TRITONCLIENT
            ),
            Contest(
                AT_ONCE,
                [Contestant(name, by_threads(make)) for name, make in shared.items()],
                TRITONCLIENT,
            ),
        ]

    def _ask(self, rows: Rows) -> object:
        return self._ours.topk(rows, K)

    def _theirs(self) -> Ask:
        client = triton.InferenceServerClient(f"{self._where.host}:{self._where.port}")
        return lambda rows: arrays(client.infer("demo", tensors(rows), parameters=PARAMETERS))

    def _ask_core(self, rows: Rows) -> object:
        return read(self._core.request("POST", **core_request(self._where, rows)), rows)

    def _ask_httpx(self, rows: Rows) -> object:
        url, content = self._where.url + PATH, b"".join(body(rows))
        return read(self._httpx.post(url, headers=HEADERS, content=content, timeout=10), rows)

    def close(self) -> None:
        for client in (self._ours, self._core, self._httpx):
            client.close()


class Asynchronous:
    """Made and closed in its event loop."""

    def __init__(self, where: Server, runner: asyncio.Runner) -> None:
        self._where = where
        self._runner = runner
        self._ours = AsyncClient(where.url, model="demo", version=1)
        self._core = httpcore.AsyncConnectionPool()
        self._httpx = httpx.AsyncClient()
        self._theirs = runner.run(self._open())

    async def _open(self) -> Any:  # noqa: ANN401
        return aio.InferenceServerClient(f"{self._where.host}:{self._where.port}")

    def contests(self) -> list[Contest]:
        both: dict[str, AsyncAsk] = {
            "AsyncClient": self._ask,
            "tritonclient.http.aio": self._ask_triton,
        }
        alone = {**both, "httpcore": self._ask_core, "httpx": self._ask_httpx}
        return [
            Contest(
                at_once,
                [
                    Contestant(name, by_tasks(self._runner, ask, at_once))
                    for name, ask in asks.items()
                ],
                TRITONCLIENT,
            )
            for at_once, asks in ((1, alone), (AT_ONCE, both))
        ]

    async def _ask(self, rows: Rows) -> object:
        return await self._ours.topk(rows, K)

    async def _ask_triton(self, rows: Rows) -> object:
        return arrays(await self._theirs.infer("demo", tensors(rows), parameters=PARAMETERS))

    async def _ask_core(self, rows: Rows) -> object:
        return read(await self._core.request("POST", **core_request(self._where, rows)), rows)

    async def _ask_httpx(self, rows: Rows) -> object:
        url, content = self._where.url + PATH, b"".join(body(rows))
        return read(await self._httpx.post(url, headers=HEADERS, content=content, timeout=10), rows)

    def close(self) -> None:
        async def close_all() -> None:
            await self._ours.close()
            await self._core.aclose()
            await self._httpx.aclose()
            await self._theirs.close()

        self._runner.run(close_all())
