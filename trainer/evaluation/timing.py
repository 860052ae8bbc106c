"""How long calls take, side by side."""

import statistics
from collections.abc import Callable
from time import perf_counter

from service.terminal import progress

TURNS, WARM_UP, CALLS = 10, 5, 30


def timed(*calls: Callable[[], object]) -> list[float]:
    """Median microseconds of each call.

    In turns of a few dozen calls: a noisy moment hits all sides, and each has its own data in the
    caches, as a server that does nothing else would.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in progress.each(range(TURNS), "taking times", steady=True):
        for call, seen in zip(calls, times, strict=True):
            for repeat in range(WARM_UP + CALLS):
                started = perf_counter()
                call()
                if repeat >= WARM_UP:
                    seen.append((perf_counter() - started) * 1e6)
    return [statistics.median(seen) for seen in times]
