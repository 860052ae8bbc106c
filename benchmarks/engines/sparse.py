"""`python -m benchmarks.engines.sparse`: one row's sparse answer, as callers in Python have it.

Heads and lists of a few sizes are made up: an expert holds the classes that are best for its gate
vector, rows lie near gate vectors. Beside the whole call stand its share inside the compiled loop
and the byte floor: how long it takes only to read the gate, the expert's int8 rows and k rows of
float32.

K experts, V classes of each, N classes, D hidden, B rows.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.document import table
from benchmarks.engines.byte_floor import ByteFloor
from benchmarks.engines.exact import Shape as HeadShape
from benchmarks.engines.exact import in_memory, made_up_head
from benchmarks.engines.timing import in_turns, one_thread
from service.bundle import Bundle, graphs
from service.engine import Engine

K_ANSWERS = 10
ROUNDS, CALLS = 15, 1000
NOISE = 0.5  # of a row's length, what it is away from its gate vector


class Shape(NamedTuple):
    n_classes: int
    hidden_size: int
    n_experts: int
    held: int  # classes in each expert


SHAPES = (
    Shape(10_000, 200, 32, 35),
    Shape(10_000, 200, 64, 80),
    Shape(10_000, 200, 64, 250),
    Shape(49_152, 576, 64, 1_500),
    Shape(49_152, 576, 64, 3_000),
)


def made_up(shape: Shape, seed: int = 0) -> tuple[Bundle, NDArray[np.float32]]:
    """A fidelity bundle, in memory, and rows for it."""
    head = made_up_head(HeadShape("", shape.n_classes, shape.hidden_size), seed)
    rng = np.random.default_rng(seed + 1)
    near = head[rng.integers(0, shape.n_classes, (shape.n_experts, 5))]
    shares = rng.dirichlet(np.ones(5), shape.n_experts)[:, :, None]
    gate = ((near * shares).sum(axis=1) * 20).astype(np.float32)  # [K,D]
    best = np.argpartition(-(gate @ head.T), shape.held - 1, axis=1)[:, : shape.held]
    base = in_memory(head)
    manifest = base.manifest.model_copy(
        update={"n_experts": shape.n_experts, "expert_sizes": [shape.held] * shape.n_experts}
    )
    bundle = replace(
        base,
        manifest=manifest,
        gate_model=graphs.gate_graph(gate),
        expert_models=(None,) * shape.n_experts,
        offsets=np.arange(shape.n_experts + 1) * shape.held,
        classes=np.sort(best, axis=1).ravel().astype(np.int32),
        previews=(None,) * shape.n_experts,
        rest=np.zeros((shape.n_experts, shape.hidden_size + 1), np.float32),
    )
    noise = rng.normal(size=(CALLS, shape.hidden_size))
    chosen = gate[rng.integers(0, shape.n_experts, CALLS)]
    away = np.linalg.norm(chosen, axis=1, keepdims=True) / np.linalg.norm(
        noise, axis=1, keepdims=True
    )
    return bundle, (chosen + NOISE * away * noise).astype(np.float32)


def measure(shape: Shape) -> dict[str, Any]:
    bundle, hidden = made_up(shape)
    engine = Engine(bundle, threads=1)
    inputs = [hidden[row : row + 1] for row in range(len(hidden))]
    answers = [engine.topk(row, K_ANSWERS) for row in inputs]
    inside = [each.gate_seconds + float(each.expert_seconds.sum()) for each in answers]
    experts = np.concatenate([each.experts for each in answers])
    read = shape.hidden_size * (shape.held + 4 * K_ANSWERS)
    gate_bytes = 4 * shape.n_experts * shape.hidden_size
    floor = ByteFloor(gate_bytes, np.full(shape.n_experts, read, np.int64))

    def calls() -> NDArray[np.float64]:
        started = perf_counter_ns()
        for row in inputs:
            engine.topk(row, K_ANSWERS)
        return np.array([(perf_counter_ns() - started) / len(inputs) / 1000])

    ours, floors = in_turns([calls, floor.turn(experts, 0)], ROUNDS)
    return {
        **shape._asdict(),
        "call_us": round(float(np.median(ours)), 2),
        "best_call_us": round(float(np.min(ours)), 2),
        "inside_us": round(float(np.median(inside)) * 1e6, 2),
        "floor_us": round(float(np.median(floors)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the numbers here, as JSON")
    asked = parser.parse_args()
    with one_thread():
        found = [measure(shape) for shape in SHAPES]
    header = ("classes", "hidden", "experts", "classes of each", "call, us", "best round",
              "in the loop", "byte floor")  # fmt: skip
    click.echo(table(header, [tuple(map(str, of.values())) for of in found]))
    if asked.out is not None:
        facts = {"k": K_ANSWERS, "rounds": ROUNDS, "calls": CALLS, "shapes": found}
        asked.out.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
