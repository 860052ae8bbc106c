"""Contestants that take turns on the same requests, so that other load of the machine falls on all
of them alike; ratios are taken within a round.
"""

import asyncio
import statistics
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

BUNDLE = Path("models/demo/1")
K, AT_ONCE = 10, 16

Rows = NDArray[np.float32]
Ask = Callable[[Rows], object]
AsyncAsk = Callable[[Rows], Awaitable[object]]


@dataclass(frozen=True)
class Turn:
    """What one contestant took for one round's requests."""

    microseconds: float  # of a request: the median; of many at once the whole by their number
    cpu_microseconds: float  # of a request, in this process


@dataclass(frozen=True)
class Contestant:
    name: str
    take_turn: Callable[[Sequence[Rows]], Turn]


@dataclass(frozen=True)
class Contest:
    at_once: int
    contestants: Sequence[Contestant]
    reference: int  # place of the contestant by whose times the others' are divided


def requests_of(size: int, calls: int) -> list[Rows]:
    """So many requests of `size` rows, from the demo model's samples."""
    samples = np.load(BUNDLE / "samples.npy")
    turned = [np.roll(samples, n, axis=0) for n in range(len(samples))]
    shaped = [np.resize(rows, (size, samples.shape[1])) for rows in turned]
    return [shaped[n % len(shaped)] for n in range(calls)]


def measured(contest: Contest, size: int, rounds: int, calls: int) -> list[dict[str, Any]]:
    """Medians over all rounds, one point for each contestant."""
    contestants, requests = contest.contestants, requests_of(size, calls)
    turns: list[list[Turn]] = [[] for _ in contestants]
    for contestant in contestants:
        contestant.take_turn(requests)  # opens connections and fills caches
    for number in range(rounds):
        order = range(len(contestants)) if number % 2 else reversed(range(len(contestants)))
        for place in order:
            turns[place].append(contestants[place].take_turn(requests))
    points = []
    references = turns[contest.reference]
    for contestant, taken in zip(contestants, turns, strict=True):
        pairs = list(zip(taken, references, strict=True))
        point = {
            "client": contestant.name,
            "beside": contestants[contest.reference].name,
            "rows": size,
            "at_once": contest.at_once,
            "us": _median(turn.microseconds for turn in taken),
            "ratio": _median(turn.microseconds / peer.microseconds for turn, peer in pairs),
            "quiet_ratio": round(_quiet(taken) / _quiet(references), 3),
            "cpu_us": _median(turn.cpu_microseconds for turn in taken),
            "cpu_ratio": _median(
                turn.cpu_microseconds / peer.cpu_microseconds for turn, peer in pairs
            ),
        }
        click.echo(point)
        points.append(point)
    return points


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def _quiet(turns: Sequence[Turn]) -> float:
    """The first decile: other load of the machine only adds to a turn's time."""
    times = sorted(turn.microseconds for turn in turns)
    return times[len(times) // 10]


# --- ways to take a turn ---------------------------------------------------------------------


def one_by_one(ask: Ask) -> Callable[[Sequence[Rows]], Turn]:
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


def by_threads(make: Callable[[], Ask]) -> Callable[[Sequence[Rows]], Turn]:
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


def by_tasks(
    runner: asyncio.Runner, ask: AsyncAsk, at_once: int
) -> Callable[[Sequence[Rows]], Turn]:
    """So many tasks of one event loop take the requests from one list."""
    return lambda requests: runner.run(_by_tasks(ask, requests, at_once))


async def _by_tasks(ask: AsyncAsk, requests: Sequence[Rows], at_once: int) -> Turn:
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
