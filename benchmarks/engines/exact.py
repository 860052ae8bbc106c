"""`python -m benchmarks.engines.exact`: exact answers against a full scan by ONNX Runtime, one row.

With `--capture FOLDER` of heads that `dss task head` has written, on held-out rows. Without it,
heads of three shapes are made up: rows of different lengths along directions of different weight, a
hidden row near those of a few classes, with a few large coordinates, as language models have them.
How many rows must be scored again depends on the numbers, so what is printed is of these heads and
no others. Both answer the same rows in turns, in one thread.

N classes, D hidden, B rows.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.document import table
from benchmarks.engines.curves.queries import read_queries
from benchmarks.engines.timing import call_times, in_turns, one_thread, summary
from service.bundle import Bundle, Manifest, graphs, head_rows
from service.engine import Engine
from service.topk import Mode
from trainer.capture.folder import read_capture
from trainer.data.arrays import Head
from trainer.evaluation import onnx_scan

K = 10
ROUNDS, CALLS, WARM_UP = 7, 60, 5
EXACT = Mode(exact=True)


class Shape(NamedTuple):
    like: str  # whose head has this shape
    n_classes: int
    hidden_size: int


SHAPES = (
    Shape("Penn Treebank", 10_000, 200),
    Shape("WikiText-2", 33_278, 200),
    Shape("SmolLM2-135M", 49_152, 576),
)


def made_up_head(shape: Shape, seed: int = 0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    weights = np.arange(1, shape.hidden_size + 1) ** -0.3
    rows = rng.normal(size=(shape.n_classes, shape.hidden_size)) * weights
    rows *= rng.lognormal(0, 0.2, (shape.n_classes, 1)) / np.sqrt((weights**2).sum())
    return rows.astype(np.float32)


def made_up_rows(head: NDArray[np.float32], n: int, seed: int = 1) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    near = rng.integers(0, len(head), (n, 5))
    shares = rng.dirichlet(np.ones(5), n)[:, :, None]
    rows = (head[near] * shares).sum(axis=1) * 20
    rows += rng.normal(size=rows.shape) * np.abs(rows).mean()
    rows[:, :3] *= 4
    return rows.astype(np.float32)


def in_memory(head: NDArray[np.float32], bias: NDArray[np.float32] | None = None) -> Bundle:
    """A layer of one expert, which is never asked."""
    n_classes, hidden_size = head.shape
    rows = head_rows.measured("head", head, *head_rows.quantise(head), bias)
    manifest = Manifest.model_construct(
        format_version=4, precision="int8", n_classes=n_classes, hidden_size=hidden_size,
        n_experts=1, expert_sizes=[1], head=True, objective="fidelity", contract=None,
    )  # fmt: skip
    return Bundle(
        path=Path(), manifest=manifest,
        gate_model=graphs.gate_graph(np.zeros((1, hidden_size), np.float32)),
        expert_models=(None,), offsets=np.array([0, 1]), classes=np.zeros(1, np.int32),
        labels=None, samples=None, previews=(None,), rows=rows,
        rest=np.zeros((1, hidden_size + 1), np.float32),
    )  # fmt: skip


def rescored(bundle: Bundle, hidden: NDArray[np.float32]) -> NDArray[np.int64]:
    """[B] classes that the bound does not rule out, given the k-th best score."""
    rows = bundle.rows
    assert rows is not None  # noqa: S101  it was made with them
    exact = hidden.astype(np.float64) @ rows.weights.T.astype(np.float64)  # [B,N]
    about = hidden @ (rows.quantised * rows.scales[:, None]).T
    if rows.bias is not None:
        exact, about = exact + rows.bias, about + rows.bias
    reach = about + np.linalg.norm(hidden, axis=1)[:, None] * rows.errors
    kth = -np.sort(-exact, axis=1)[:, K - 1 : K]
    return (reach >= kth).sum(axis=1)


def made_up(shape: Shape) -> tuple[Shape, Head, NDArray[np.float32]]:
    weight = made_up_head(shape)
    return shape, Head(weight, None), made_up_rows(weight, CALLS + WARM_UP)


def captured(folder: Path) -> tuple[Shape, Head, NDArray[np.float32]]:
    found = read_queries(read_capture(folder), CALLS + WARM_UP)
    weight = np.ascontiguousarray(found.head.weight, np.float32)
    head = Head(weight, found.head.bias)
    return Shape(folder.name, *weight.shape), head, found.hidden


def measure(shape: Shape, head: Head, hidden: NDArray[np.float32]) -> dict[str, Any]:
    bundle = in_memory(head.weight, head.bias)
    engine, scan = Engine(bundle, threads=1), onnx_scan.full(head)
    inputs = [hidden[row : row + 1] for row in range(len(hidden))]
    same = [engine.topk(row, K, mode=EXACT).classes[0].tolist() for row in inputs]
    alike = [scan.topk(row, K)[0].tolist() == of for row, of in zip(inputs, same, strict=True)]
    turns = [
        lambda: call_times(lambda rows: scan.topk(rows, K), inputs, WARM_UP),
        lambda: call_times(lambda rows: engine.topk(rows, K, mode=EXACT), inputs, WARM_UP),
    ]
    theirs, ours = (summary(rounds) for rounds in in_turns(turns, ROUNDS))
    again = rescored(bundle, hidden)
    return {
        **shape._asdict(),
        "onnx_runtime_fp32": theirs,
        "exact": ours,
        "times_faster": round(theirs["p50_us"] / ours["p50_us"], 2),
        "rows_answered_alike": round(float(np.mean(alike)), 4),
        "rescored_mean": round(float(again.mean()), 1),
        "rescored_p99": int(np.percentile(again, 99)),
        "rescored_share": float(again.mean() / shape.n_classes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--capture",
        type=Path,
        action="append",
        help="a folder with a head and its rows; can be given several times",
    )
    parser.add_argument("--out", type=Path, help="also write the numbers here, as JSON")
    asked = parser.parse_args()
    with one_thread():
        folders = asked.capture or []
        given = map(captured, folders) if folders else map(made_up, SHAPES)
        found = [measure(*of) for of in given]
    header = ("shape of", "classes", "hidden", "ONNX Runtime fp32, us", "exact, us", "times faster",
              "scored again", "p99")  # fmt: skip
    click.echo(
        table(
            header,
            [
                (
                    of["like"],
                    f"{of['n_classes']:,}",
                    str(of["hidden_size"]),
                    f"{of['onnx_runtime_fp32']['p50_us']:.0f}",
                    f"{of['exact']['p50_us']:.0f}",
                    f"{of['times_faster']:.2f}",
                    f"{of['rescored_mean']:.0f} ({of['rescored_share']:.2%})",
                    str(of["rescored_p99"]),
                )
                for of in found
            ],
        )
    )
    if asked.out is not None:
        heads = "captured" if folders else "made up"
        facts = {"k": K, "rounds": ROUNDS, "calls": CALLS, "heads": heads, "shapes": found}
        asked.out.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
