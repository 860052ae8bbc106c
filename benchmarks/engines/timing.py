"""Who is timed takes turns: drift of the machine hits all alike. One thread for everybody."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

Rows = NDArray[np.float32]  # [B,D]
Times = NDArray[np.float64]  # [C] microseconds of each call
Turn = Callable[[], Times]


@contextmanager
def one_thread() -> Iterator[None]:
    """For BLAS, OpenMP (FAISS among them) and torch; the others are told by their own settings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def call_times(call: Callable[[Rows], object], inputs: Sequence[Rows], warm_up: int) -> Times:
    """Of one call for each input, but for the first ones, which bring its data into the caches."""
    for rows in inputs[:warm_up]:
        call(rows)
    times = np.empty(len(inputs) - warm_up)
    for place, rows in enumerate(inputs[warm_up:]):
        started = perf_counter_ns()
        call(rows)
        times[place] = perf_counter_ns() - started
    return times / 1000


def in_turns(turns: Sequence[Turn], rounds: int, seed: int = 0) -> list[list[Times]]:
    """The times of every turn [turn][round], taken in another order in every round."""
    rng = np.random.default_rng(seed)
    seen: list[list[Times]] = [[] for _ in turns]
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for place in rng.permutation(len(turns)):
                seen[place].append(turns[place]())
    finally:
        gc.enable()
    return seen


def summary(rounds: Sequence[Times], rows: int = 1) -> dict[str, Any]:
    """Medians over rounds, per call; a call of several rows by the row."""
    means = [float(times.mean()) / rows for times in rounds]
    return {
        "mean_us": _rounded(np.median(means)),
        "p50_us": _rounded(np.median([np.percentile(times, 50) for times in rounds]) / rows),
        "p99_us": _rounded(np.median([np.percentile(times, 99) for times in rounds]) / rows),
        "round_means_us": [_rounded(mean) for mean in means],
    }


def _rounded(microseconds: float | np.floating[Any]) -> float:
    return round(float(microseconds), 3)
