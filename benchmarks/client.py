"""This project's Python client beside tritonclient, on the same rows and the same server.

All ask a server on the demo model for the top 10 and have numpy arrays in the end; so do httpx and
httpcore, asked as plainly as they can be. They take turns in each round, so that what else the
machine does falls on all of them; ratios are taken within a round, and of everything the median
over the rounds.

    python -m benchmarks.client --document docs/client.md
"""

import asyncio
import shlex
import statistics
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import click
import httpcore
import httpx
import numpy as np
import tritonclient.http as triton
from numpy.typing import NDArray
from tritonclient.http import aio

from benchmarks.engines.report import table, write_part
from service.bench import server
from service.bench.target import Server
from service.client import AsyncClient, Client, answers
from service.client.http1 import Reply
from service.client.rows import body
from service.system.machine import machine
from trainer.data.files import write_json

RESULTS = Path("benchmarks/results/client.json")
BUNDLE = Path("models/demo/1")
K, AT_ONCE = 10, 16
PATH = f"/models/demo/versions/1/topk?k={K}&experts=1"
PARAMETERS = {"k": K, "experts": 1}
OUTPUTS = ("classes", "log_probs", "experts", "gates")
HEADERS = {"Content-Type": answers.NPY, "Accept": answers.NPY, "DSS-Timeout": "10"}
TIMEOUTS = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), 10.0)}
PACKAGES = (
    "numpy",
    "httptools",
    "tritonclient",
    "geventhttpclient",
    "aiohttp",
    "httpx",
    "httpcore",
)

Rows = NDArray[np.float32]
Ask = Callable[[Rows], object]
AskSoon = Callable[[Rows], Awaitable[object]]


@dataclass(frozen=True)
class Turn:
    """What one contestant took for one round's requests."""

    microseconds: float  # of a request: the median, or of many at once all by their number
    cpu_microseconds: float  # of a request, in this process


@dataclass(frozen=True)
class Contestant:
    name: str
    take_turn: Callable[[Sequence[Rows]], Turn]


@dataclass(frozen=True)
class Contest:
    """The first is this project's, the second tritonclient's."""

    at_once: int
    contestants: Sequence[Contestant]


# --- asking ----------------------------------------------------------------------------------


def tensors(rows: Rows) -> list[Any]:
    hidden = triton.InferInput("hidden", list(rows.shape), "FP32")
    hidden.set_data_from_numpy(rows)
    return [hidden]


def arrays(result: Any) -> list[Any]:  # noqa: ANN401
    return [result.as_numpy(name) for name in OUTPUTS]


def read(reply: Any, rows: Rows) -> object:  # noqa: ANN401
    """What httpcore or httpx has brought."""
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
        theirs = self._theirs()
        alone = {
            "Client": self._ask,
            "tritonclient.http": theirs,
            "httpcore": self._ask_core,
            "httpx": self._ask_httpx,
        }
        return [
            Contest(1, [Contestant(name, _one_by_one(ask)) for name, ask in alone.items()]),
            Contest(
                AT_ONCE,
                [
                    Contestant("Client", _by_threads(lambda: self._ask)),
                    # It must not be shared by threads, so each has its own.
                    Contestant("tritonclient.http", _by_threads(self._theirs)),
                ],
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
        both: dict[str, AskSoon] = {
            "AsyncClient": self._ask,
            "tritonclient.http.aio": self._ask_triton,
        }
        alone = {**both, "httpcore": self._ask_core, "httpx": self._ask_httpx}
        return [
            Contest(1, [Contestant(name, self._by_tasks(ask, 1)) for name, ask in alone.items()]),
            Contest(
                AT_ONCE,
                [Contestant(name, self._by_tasks(ask, AT_ONCE)) for name, ask in both.items()],
            ),
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

    def _by_tasks(self, ask: AskSoon, at_once: int) -> Callable[[Sequence[Rows]], Turn]:
        return lambda requests: self._runner.run(_by_tasks(ask, requests, at_once))

    def close(self) -> None:
        async def close_all() -> None:
            await self._ours.close()
            await self._core.aclose()
            await self._httpx.aclose()
            await self._theirs.close()

        self._runner.run(close_all())


# --- turns -----------------------------------------------------------------------------------


def _one_by_one(ask: Ask) -> Callable[[Sequence[Rows]], Turn]:
    def turn(requests: Sequence[Rows]) -> Turn:
        seconds = []
        before = process_time()
        for rows in requests:
            started = perf_counter()
            ask(rows)
            seconds.append(perf_counter() - started)
        cpu = (process_time() - before) / len(requests)
        return Turn(statistics.median(seconds) * 1e6, cpu * 1e6)

    return turn


def _by_threads(make: Callable[[], Ask]) -> Callable[[Sequence[Rows]], Turn]:
    """Each thread has its share of the requests."""

    def turn(requests: Sequence[Rows]) -> Turn:
        connected = threading.Barrier(AT_ONCE + 1)

        def work(mine: Sequence[Rows]) -> None:
            ask = make()
            ask(mine[0])
            connected.wait()
            for rows in mine:
                ask(rows)

        threads = [
            threading.Thread(target=work, args=(requests[place::AT_ONCE],))
            for place in range(AT_ONCE)
        ]
        for thread in threads:
            thread.start()
        connected.wait()
        started, before = perf_counter(), process_time()
        for thread in threads:
            thread.join()
        seconds, cpu = perf_counter() - started, process_time() - before
        return Turn(seconds / len(requests) * 1e6, cpu / len(requests) * 1e6)

    return turn


async def _by_tasks(ask: AskSoon, requests: Sequence[Rows], at_once: int) -> Turn:
    waiting = iter(requests)
    seconds: list[float] = []

    async def work() -> None:
        for rows in waiting:
            began = perf_counter()
            await ask(rows)
            seconds.append(perf_counter() - began)

    started, before = perf_counter(), process_time()
    await asyncio.gather(*(work() for _ in range(at_once)))
    whole, cpu = perf_counter() - started, process_time() - before
    each = statistics.median(seconds) if at_once == 1 else whole / len(requests)
    return Turn(each * 1e6, cpu / len(requests) * 1e6)


# --- the comparison --------------------------------------------------------------------------


def compare(rounds: int, calls: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    samples = np.load(BUNDLE / "samples.npy")
    points: list[dict[str, Any]] = []
    with server.started(BUNDLE, workers=None) as where, asyncio.Runner() as runner:
        for clients in (Blocking(where), Asynchronous(where, runner)):
            for contest in clients.contests():
                for size in sizes:
                    asked = [np.roll(samples, n, axis=0) for n in range(len(samples))]
                    shaped = [np.resize(rows, (size, samples.shape[1])) for rows in asked]
                    requests = [shaped[n % len(shaped)] for n in range(calls)]
                    points += _measured(contest, size, rounds, requests)
            clients.close()
    return points


def _measured(
    contest: Contest, size: int, rounds: int, requests: Sequence[Rows]
) -> list[dict[str, Any]]:
    contestants = contest.contestants
    turns: list[list[Turn]] = [[] for _ in contestants]
    for contestant in contestants:
        contestant.take_turn(requests)  # what is learned first is learned now
    for number in range(rounds):
        order = range(len(contestants)) if number % 2 else reversed(range(len(contestants)))
        for place in order:
            turns[place].append(contestants[place].take_turn(requests))
    points = []
    for contestant, taken in zip(contestants, turns, strict=True):
        points.append(
            {
                "client": contestant.name,
                "beside": contestants[1].name,
                "rows": size,
                "at_once": contest.at_once,
                "us": _median(turn.microseconds for turn in taken),
                "ratio": _median(
                    turn.microseconds / peer.microseconds
                    for turn, peer in zip(taken, turns[1], strict=True)
                ),
                "cpu_us": _median(turn.cpu_microseconds for turn in taken),
                "cpu_ratio": _median(
                    turn.cpu_microseconds / peer.cpu_microseconds
                    for turn, peer in zip(taken, turns[1], strict=True)
                ),
            }
        )
        click.echo(points[-1])
    return points


def _median(values: Any) -> float:  # noqa: ANN401
    return round(statistics.median(values), 3)


@click.command()
@click.option("--rounds", default=40, help="Each contestant's turns. [40]")
@click.option("--calls", default=160, help="Requests of a turn. [160]")
@click.option("--rows", default="1,64", help="Of a request. [1,64]")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS)
@click.option("--document", type=click.Path(path_type=Path), help="Where the table goes.")
def main(rounds: int, calls: int, rows: str, out: Path, document: Path | None) -> None:
    results = {
        "command": shlex.join(["python", "-m", "benchmarks.client", *sys.argv[1:]]),
        "machine": machine(*PACKAGES),
        "rounds": rounds,
        "calls": calls,
        "k": K,
        "points": compare(rounds, calls, [int(part) for part in rows.split(",")]),
    }
    write_json(out, results)
    if document is not None:
        write_part(document, "client", rendered(results))


def rendered(results: dict[str, Any]) -> str:
    header = ["", "at once", "rows", "us a request", "of tritonclient's", "its CPU us", "of those"]
    lines = [
        [
            f"`{point['client']}`" if "lient" in point["client"] else point["client"],
            str(point["at_once"]),
            str(point["rows"]),
            f"{point['us']:,.0f}",
            f"{point['ratio']:.2f}",
            f"{point['cpu_us']:,.0f}",
            f"{point['cpu_ratio']:.2f}",
        ]
        for point in results["points"]
    ]
    said = results["machine"]
    words = (
        f"Measured on {said['cores']} cores of an {said['cpu']}, which the server shares, by"
        f" `{results['command']}`: {results['rounds']} rounds of {results['calls']} requests, top"
        f" {results['k']} of the demo model, tritonclient {said['tritonclient']}, httpx"
        f" {said['httpx']} and httpcore {said['httpcore']}. With {AT_ONCE} at once (threads, or"
        " tasks of one event loop) a request's time is that of all, divided by their number."
    )
    return f"{words}\n\n{table(header, lines)}"


if __name__ == "__main__":
    main()
