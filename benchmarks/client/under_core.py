"""This project's connections beside HTTP libraries that carry the same messages of the same core.

The three pairs are what `Client` and `AsyncClient` could use instead of their own sockets: each is
put in their place, nothing else differs.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from benchmarks.client import transports
from benchmarks.client.turns import (
    AT_ONCE,
    BUNDLE,
    Contest,
    Contestant,
    K,
    by_tasks,
    by_threads,
    measured,
    one_by_one,
    requests_of,
)
from service.bench import server
from service.client import AsyncClient, Client, address

T = TypeVar("T")
OURS = 0  # its place in each contest
BLOCKING: dict[str, Any] = {
    "Client": None,
    "pyreqwest": transports.Pyreqwest,
    "urllib3": transports.Urllib3,
    "httpx": transports.Httpx,
}
ASYNCHRONOUS: dict[str, Any] = {
    "AsyncClient": None,
    "pyreqwest": transports.AsyncPyreqwest,
    "aiohttp": transports.Aiohttp,
    "httpx": transports.AsyncHttpx,
}


def compare(rounds: int, calls: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    with server.started(BUNDLE, workers=None) as where, asyncio.Runner() as runner:
        blocking = {n: _carried_by(t, Client, where.url) for n, t in BLOCKING.items()}
        tasks = {n: _carried_by(t, AsyncClient, where.url) for n, t in ASYNCHRONOUS.items()}
        _check(blocking, tasks, runner)
        contests = [
            Contest(1, [Contestant(n, one_by_one(c.topk)) for n, c in blocking.items()], OURS),
            Contest(
                AT_ONCE,
                [Contestant(n, by_threads(lambda c=c: c.topk)) for n, c in blocking.items()],
                OURS,
            ),
            *(
                Contest(
                    at_once,
                    [Contestant(n, by_tasks(runner, c.topk, at_once)) for n, c in tasks.items()],
                    OURS,
                )
                for at_once in (1, AT_ONCE)
            ),
        ]
        for contest in contests:
            for size in sizes:
                points += measured(contest, size, rounds, calls)
        for client in blocking.values():
            client.close()
        for task_client in tasks.values():
            runner.run(task_client.close())
    return points


def _carried_by(transport: Any, kind: Callable[..., T], url: str) -> T:  # noqa: ANN401
    """A client whose connections are replaced by a transport; None leaves it its own."""
    client: Any = kind(url, model="demo", version=1)
    if transport is not None:
        client._connections = transport(address.parse(url), None)
    made: T = client
    return made


def _check(
    blocking: dict[str, Client], tasks: dict[str, AsyncClient], runner: asyncio.Runner
) -> None:
    """All have the same answer."""
    (rows,) = requests_of(8, 1)
    expected = blocking["Client"].topk(rows, K)
    found = [client.topk(rows, K) for client in blocking.values()]
    found += [runner.run(client.topk(rows, K)) for client in tasks.values()]
    for answer in found:
        np.testing.assert_array_equal(answer.classes, expected.classes)
        np.testing.assert_array_equal(answer.log_probs, expected.log_probs)
