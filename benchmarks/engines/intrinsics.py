"""What the engine's LLVM written by hand saves over the same loops in numba, in one run.

Each pair takes turns on the same arrays; the ratio says how many times longer the other way takes.
The last pair are calls of a compiled function with a packed layer and with a named tuple of the
layer's arrays. Writes benchmarks/results/intrinsics.json.

    python -m benchmarks.engines.intrinsics

D hidden, K experts, V classes of an expert, n rows, c candidates.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import click
import numpy as np
from numba import njit
from numpy.typing import NDArray

from benchmarks.engines.timing import Times, in_turns
from service.engine.kernels.jit import ORDERED, Floats, Integers
from service.engine.kernels.layer import Layer, pack
from service.engine.kernels.products.float_products import dot, fetch, score_one, score_one_in_cache
from service.engine.kernels.products.int8_products import add_int8_products, blocks_of, quantise
from service.system.machine import machine
from trainer.data.files import write_json

RESULTS = Path("benchmarks/results/intrinsics.json")
ROUNDS = 41
TIMES = 200  # that a loop is run in one round
GATES = ((200, 64), (512, 64), (200, 256))  # D, K
EXPERTS = ((67, 4000), (200, 2000), (512, 1000))  # D, V
LARGE = ((200, 400_000), (512, 200_000))  # D, V: far more than the caches hold
CANDIDATES = 20

Int8 = NDArray[np.int8]
plain = njit(nogil=True, fastmath=ORDERED)  # not kept on disk: that folder is the kernels' own


@plain
def gate_by_hand(h: Floats, gate: Floats, n_experts: int, logits: Floats) -> None:
    for _ in range(TIMES):
        score_one_in_cache(h, gate, n_experts, logits)


@plain
def gate_by_numba(h: Floats, gate: Floats, n_experts: int, logits: Floats) -> None:
    for _ in range(TIMES):
        score_one(h, gate, 0, n_experts, logits)


@plain
def int8_by_hand(x: Int8, matrix: Int8, scales: Floats, width: int, scores: Floats) -> None:
    add_int8_products(x, np.float32(1), width, matrix, scales, 0, scores)


@plain
def int8_dot_by_numba(x: Int8, row: Int8) -> np.int32:
    total = np.int32(0)
    for d in range(row.shape[0]):
        # Said to be 32 bits at each step, or else the sum is made in 64.
        total = np.int32(total + np.int32(np.int32(x[d]) * np.int32(row[d])))
    return total


@plain
def int8_by_numba(x: Int8, matrix: Int8, scales: Floats, width: int, scores: Floats) -> None:
    for v in range(scores.shape[0]):
        total = int8_dot_by_numba(x, matrix[v * width : (v + 1) * width])
        scores[v] = scores[v] + np.float32(total) * scales[v]


@plain
def rescore(h: Floats, weights: Floats, rows: Integers, scores: Floats, prefetched: bool) -> None:
    """Scores the weight rows [n,c] one set after the other."""
    width = h.shape[0]
    for candidates in rows:
        if prefetched:
            for v in candidates:
                fetch(weights, v * width, width)
        for i in range(candidates.shape[0]):
            v = candidates[i]
            scores[i] = dot(h, weights[v * width : (v + 1) * width])


@plain
def called_packed(packed: Integers) -> int:
    return packed.shape[0]


@plain
def called_with_tuple(layer: Layer) -> int:
    return layer.n_classes


def main() -> None:
    results = [*gates(), *int8_experts(), *prefetching(), *calls()]
    found = {
        "command": "python -m benchmarks.engines.intrinsics",
        "machine": machine("numba", "numpy"),
        "rounds": ROUNDS,
        "ratios": results,
    }
    write_json(RESULTS, found)


def gates() -> list[dict[str, Any]]:
    found = []
    for width, size in GATES:
        arguments = (numbers(width), numbers(width * size), size, np.zeros(size, np.float32))
        found.append(
            ratio(
                f"gate of {size} experts, D = {width}: numba's loop",
                partial(gate_by_hand, *arguments),
                partial(gate_by_numba, *arguments),
            )
        )
    return found


def int8_experts() -> list[dict[str, Any]]:
    found = []
    for width, size in EXPERTS:
        x = np.empty(blocks_of(width), np.int8)
        quantise(numbers(width), x)
        matrix = np.random.default_rng(1).integers(-63, 64, width * size).astype(np.int8)
        arguments = (x, matrix, numbers(size), width, np.zeros(size, np.float32))
        found.append(
            ratio(
                f"int8 expert of {size} classes, D = {width}: numba's loop",
                partial(repeat, int8_by_hand, *arguments),
                partial(repeat, int8_by_numba, *arguments),
            )
        )
    return found


def prefetching() -> list[dict[str, Any]]:
    """Every call takes weight rows that no call has taken lately."""
    found = []
    for width, size in LARGE:
        weights, h = np.ones(width * size, np.float32), numbers(width)
        rng, scores = np.random.default_rng(2), np.empty(CANDIDATES, np.float32)
        shape = (2 + 2 * ROUNDS, TIMES, CANDIDATES)
        rows = iter(np.sort(rng.integers(size, size=shape), axis=2))  # [n,c] for each call
        found.append(
            ratio(
                f"{CANDIDATES} candidates of {size} classes, D = {width}: no prefetch",
                partial(rescore_next, h, weights, rows, scores, True),
                partial(rescore_next, h, weights, rows, scores, False),
            )
        )
    return found


def rescore_next(
    h: Floats, weights: Floats, rows: Iterator[Integers], scores: Floats, prefetched: bool
) -> None:
    rescore(h, weights, next(rows), scores, prefetched)


def calls() -> list[dict[str, Any]]:
    layer = Layer(
        gate=numbers(200 * 64),
        gate_bias=numbers(64),
        weights=numbers(200 * 100),
        biases=numbers(0),
        quantised=np.empty(0, np.int8),
        scales=numbers(0),
        offsets=np.arange(65),
        classes=np.arange(100, dtype=np.int32),
        n_classes=100,
    )
    packed = pack(layer)
    return [
        ratio(
            "a call with a named tuple of the layer's arrays",
            partial(repeat, called_packed, packed),
            partial(repeat, called_with_tuple, layer),
        )
    ]


def repeat(call: Callable[..., object], *given: object) -> None:
    for _ in range(TIMES):
        call(*given)


def numbers(count: int) -> Floats:
    return np.random.default_rng(0).normal(size=count).astype(np.float32)


def ratio(what: str, ours: Callable[[], object], other: Callable[[], object]) -> dict[str, Any]:
    """The other's time over ours, each in its fastest round: other processes only add to a time."""
    for call in (ours, other):  # compiles it
        call()
    times = in_turns([turn(ours), turn(other)], ROUNDS)
    us, them = (float(np.min(rounds)) / TIMES for rounds in times)
    click.echo(f"{what:55} {us:9.3f} us, {them:9.3f} us: {them / us:.2f}")
    return {
        "other": what,
        "ours_us": round(us, 3),
        "other_us": round(them, 3),
        "ratio": round(them / us, 2),
    }


def turn(call: Callable[[], object]) -> Callable[[], Times]:
    def timed() -> Times:
        started = perf_counter_ns()
        call()
        return np.array([(perf_counter_ns() - started) / 1000])

    return timed


if __name__ == "__main__":
    main()
