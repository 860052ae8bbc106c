"""The byte floor: how long it takes only to read what an answer must read.

A row needs the gate and its expert's rows as they are stored. Blocks of the same sizes, in an array
of the same size, are read in the order in which the rows' experts ask for them.

K experts, M rows.
"""

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from service.bundle import Bundle

WORD = 8
STREAMS = 8
READS = 300  # in a round; fewer would stay in the caches
BYTES = {"fp32": 4, "fp16": 2, "int8": 1}

Words = NDArray[np.uint64]
Integers = NDArray[np.int64]
Read = Callable[[Words, int, Integers, Integers], int]


@njit(nogil=True, cache=True)
def _sum(words: Words) -> int:
    total = np.uint64(0)
    for place in range(words.shape[0]):
        total += words[place]
    return total


@njit(nogil=True, cache=True)
def _sum_of_eight(words: Words) -> int:
    """Eight places at once: more of them are fetched from memory at the same time."""
    n = words.shape[0] // STREAMS
    a, b, c, d = words[:n], words[n : 2 * n], words[2 * n : 3 * n], words[3 * n : 4 * n]
    e, f, g, h = words[4 * n : 5 * n], words[5 * n : 6 * n], words[6 * n : 7 * n], words[7 * n :]
    total = np.uint64(0)
    for place in range(n):
        total += (a[place] + b[place]) + (c[place] + d[place])
        total += (e[place] + f[place]) + (g[place] + h[place])
    return total


# A part of the array as an array of its own: places counted from elsewhere are not vectorised.
@njit(nogil=True, cache=True)
def _read_through(words: Words, gate: int, starts: Integers, ends: Integers) -> int:
    total = np.uint64(0)
    for block in range(starts.shape[0]):
        total += _sum(words[:gate]) + _sum(words[starts[block] : ends[block]])
    return total


@njit(nogil=True, cache=True)
def _read_in_eight(words: Words, gate: int, starts: Integers, ends: Integers) -> int:
    total = np.uint64(0)
    for block in range(starts.shape[0]):
        total += _sum(words[:gate]) + _sum_of_eight(words[starts[block] : ends[block]])
    return total


LOOPS = (cast(Read, _read_through), cast(Read, _read_in_eight))


class ByteFloor:
    """Reads what the rows of given experts need, and nothing else."""

    def __init__(self, gate_bytes: int, expert_bytes: NDArray[np.int64]) -> None:
        self._gate = gate_bytes // WORD
        blocks = expert_bytes // WORD  # [K]
        self._ends = self._gate + np.cumsum(blocks)  # [K]
        self._starts = self._ends - blocks  # [K]
        # Not zeros: a page that was never written is not in memory.
        self._words: Words = np.arange(int(self._ends[-1]), dtype=np.uint64)

    @classmethod
    def of(cls, bundle: Bundle) -> "ByteFloor":
        manifest = bundle.manifest
        stored = BYTES[manifest.precision] * manifest.hidden_size
        # Of an approximated expert fewer rows are read than it holds.
        sizes = np.array(bundle.expert_costs)  # [K]
        expert_bytes = (stored * sizes).astype(np.int64)
        return cls(4 * manifest.n_experts * manifest.hidden_size, expert_bytes)

    def bytes_per_row(self, experts: Integers) -> float:
        blocks = self._ends[experts] - self._starts[experts]  # [M]
        return float(self._gate + blocks.mean()) * WORD

    def microseconds(self, experts: Integers) -> float:
        """For a row of experts [M], by the faster loop."""
        starts, ends = self._starts[experts], self._ends[experts]
        taken = [self._taken(read, starts, ends) for read in LOOPS]
        return min(taken) / len(experts) / 1000

    def turn(self, experts: Integers, seed: int) -> Callable[[], NDArray[np.float64]]:
        """One round: rows drawn from those of experts [M], after others that fill the caches."""
        rng = np.random.default_rng(seed)

        def read() -> NDArray[np.float64]:
            for _ in range(2):
                taken = self.microseconds(experts[rng.integers(len(experts), size=READS)])
            return np.array([taken])

        return read

    def _taken(self, read: Read, starts: Integers, ends: Integers) -> int:
        started = perf_counter_ns()
        read(self._words, self._gate, starts, ends)
        return perf_counter_ns() - started

    def figures(self, experts: Integers, rounds: list[NDArray[Any]]) -> dict[str, float]:
        """From the times of all rounds; the best of them is the floor."""
        best = float(np.min(rounds))
        needed = self.bytes_per_row(experts)
        return {
            "bytes_per_row": round(needed),
            "floor_us": round(best, 3),
            "floor_median_us": round(float(np.median(rounds)), 3),
            "gigabytes_per_second": round(needed / best / 1000, 2),
        }
