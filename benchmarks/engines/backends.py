"""One bundle answered in several ways, and where the time of each goes, in one run.

ONNX Runtime sessions as the onnx backend runs them, the same with IOBinding, numpy with BLAS, and
the compiled loops. All give the same classes, which is checked first. Batches of 1 to 256 rows.

    python -m benchmarks.engines.backends --bundle runs/v2/ptb-ds-64/1 \
        --hidden runs/lm-ptb/hidden/test.npy

B rows, b rows of an expert, D hidden, K experts, k answers.
"""

import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import click
import numpy as np
import onnxruntime
from numpy.typing import NDArray

from benchmarks.document import table, write_part
from benchmarks.engines.timing import Rows, call_times, in_turns, one_thread, summary
from service import bundle as bundles
from service.bundle import Bundle, graphs
from service.engine import Engine, onnx_sessions
from service.system.machine import machine
from trainer.data.files import write_json

K = 10
BATCHES = (1, 8, 32, 256)
WARM_UP = 5
Classes = NDArray[np.int64]


class Grouped(ABC):
    """Gate, then each expert once for all its rows: what is common to the plain ways."""

    def __init__(self, bundle: Bundle) -> None:
        self.classes = [
            bundle.expert_classes(expert).astype(np.int64)
            for expert in range(bundle.manifest.n_experts)
        ]
        self.gate_seconds = self.expert_seconds = 0.0

    def topk(self, hidden: Rows) -> Classes:
        """Of experts that hold K classes or more."""
        started = perf_counter()
        chosen, gates = self.rank(hidden)  # [B] each
        self.gate_seconds = perf_counter() - started
        self.expert_seconds = 0.0
        answer = np.empty((len(hidden), K), np.int64)
        for expert in np.unique(chosen).tolist():
            rows = np.flatnonzero(chosen == expert)
            part, gate = hidden[rows], gates[rows]
            started = perf_counter()
            places = self.search(expert, part, gate)  # [b,K]
            self.expert_seconds += perf_counter() - started
            answer[rows] = self.classes[expert][places]
        return answer

    @abstractmethod
    def rank(self, hidden: Rows) -> tuple[Classes, NDArray[np.float32]]: ...

    @abstractmethod
    def search(self, expert: int, hidden: Rows, gate: NDArray[np.float32]) -> Classes: ...


class Blas(Grouped):
    """numpy: products, argpartition, and the log-sum-exp that an answer needs."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self.gate = np.ascontiguousarray(graphs.constants(bundle.gate_model)["U"].T)
        experts = range(bundle.manifest.n_experts)
        self.weights = [np.ascontiguousarray(bundle.expert_weight(e).T) for e in experts]

    def rank(self, hidden: Rows) -> tuple[Classes, NDArray[np.float32]]:
        logits = hidden @ self.gate
        chosen = logits.argmax(axis=1)
        best = np.take_along_axis(logits, chosen[:, None], axis=1)
        return chosen, 1 / np.exp(logits - best).sum(axis=1)

    def search(self, expert: int, hidden: Rows, gate: NDArray[np.float32]) -> Classes:
        scores = (hidden @ self.weights[expert]) * gate[:, None]  # [b,V]
        np.log(np.exp(scores).sum(axis=1))
        places = np.argpartition(-scores, K - 1, axis=1)[:, :K]
        order = np.argsort(-np.take_along_axis(scores, places, axis=1), axis=1)
        return np.take_along_axis(places, order, axis=1)


class Bound(Grouped):
    """ONNX Runtime with IOBinding: inputs and outputs are bound, and nothing is looked up."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self.gate = onnx_sessions._session(bundle.gate_model, {}, 1)
        self.experts = [
            None if model is None else onnx_sessions._session(model, bundle.external(expert), 1)
            for expert, model in enumerate(bundle.expert_models)
        ]

    def rank(self, hidden: Rows) -> tuple[Classes, NDArray[np.float32]]:
        chosen, gates = run_bound(self.gate, hidden=hidden, g=np.array([1]))
        return chosen[:, 0], gates[:, 0]

    def search(self, expert: int, hidden: Rows, gate: NDArray[np.float32]) -> Classes:
        session = self.experts[expert]
        assert session is not None  # noqa: S101
        _, places, _ = run_bound(session, hidden=hidden, gate=gate[:, None], k=np.array([K]))
        return places


def run_bound(
    session: onnxruntime.InferenceSession, **inputs: NDArray[np.generic]
) -> list[NDArray[np.generic]]:
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_cpu_input(name, array)
    for output in session.get_outputs():
        binding.bind_output(output.name)
    session.run_with_iobinding(binding)
    return [value.numpy() for value in binding.get_outputs()]


Spent = tuple[float, float]  # seconds of a call in the gate and in experts


def spent_by_engine(engine: Engine, rows: Rows) -> Spent:
    answer = engine.topk(rows, K)
    return answer.gate_seconds, float(answer.expert_seconds.sum())


def spent_by_grouped(way: Grouped, rows: Rows) -> Spent:
    way.topk(rows)
    return way.gate_seconds, way.expert_seconds


def shares(spent: Callable[[Rows], Spent], parts: list[Rows]) -> tuple[float, float]:
    """Of the whole time, in the gate and in experts."""
    whole = gate = experts = 0.0
    for part in parts:
        started = perf_counter()
        in_gate, in_experts = spent(part)
        whole += perf_counter() - started
        gate, experts = gate + in_gate, experts + in_experts
    return gate / whole, experts / whole


Call = Callable[[Rows], object]


@click.command()
@click.option("--bundle", type=click.Path(path_type=Path), required=True)
@click.option("--hidden", type=click.Path(path_type=Path), required=True)
@click.option("--rounds", default=11, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default="benchmarks/results/backends.json")
@click.option("--document", type=click.Path(path_type=Path), help="Where the table goes.")
def main(bundle: Path, hidden: Path, rounds: int, out: Path, document: Path | None) -> None:
    made = bundles.read(bundle)
    vectors = np.load(hidden, mmap_mode="r")
    places = np.random.default_rng(0).permutation(len(vectors))[:8192]
    rows = np.ascontiguousarray(vectors[np.sort(places)], np.float32)[np.argsort(places)]
    compiled, sessions = Engine(made, backend="compiled"), Engine(made, backend="onnx")
    # The plain ways cannot go on to a second expert, so rows that must are left out.
    large = np.array(made.manifest.expert_sizes) >= K
    rows = rows[large[compiled.topk(rows, 1).experts]]
    bound, blas = Bound(made), Blas(made)
    ways: dict[str, tuple[Call, Callable[[Rows], Spent]]] = {
        "compiled loops": (lambda x: compiled.topk(x, K), partial(spent_by_engine, compiled)),
        "ONNX Runtime sessions": (
            lambda x: sessions.topk(x, K),
            partial(spent_by_engine, sessions),
        ),
        "ONNX Runtime, IOBinding": (bound.topk, partial(spent_by_grouped, bound)),
        "numpy, BLAS": (blas.topk, partial(spent_by_grouped, blas)),
    }
    expected = compiled.topk(rows[:512], K).classes
    for way in (
        sessions.topk(rows[:512], K).classes,
        bound.topk(rows[:512]),
        blas.topk(rows[:512]),
    ):
        if (way == expected).all(axis=1).mean() < 0.99:
            raise click.ClickException("The ways do not answer the same.")
    results = []
    with one_thread():
        for batch in BATCHES:
            parts = [rows[i : i + batch] for i in range(0, len(rows) - batch + 1, batch)]
            parts = parts[: WARM_UP + max(10, 300 // batch)]
            turns = [partial(call_times, call, parts, WARM_UP) for call, _ in ways.values()]
            for (name, (_, spent)), times in zip(
                ways.items(), in_turns(turns, rounds), strict=True
            ):
                whole = summary(times)
                gate, experts = (share * whole["mean_us"] for share in shares(spent, parts))
                results.append(
                    {"way": name, "batch": batch, **whole, "gate_us": gate, "experts_us": experts}
                )
                click.echo(f"{name:26} {batch:4} rows {whole['mean_us']:9.1f} us a call")
    found = {
        "command": shlex.join(["python", "-m", "benchmarks.engines.backends", *sys.argv[1:]]),
        "machine": machine(),
        "bundle": {"name": bundle.parent.name, "precision": made.manifest.precision},
        "k": K,
        "rounds": rounds,
        "results": results,
    }
    write_json(out, found)
    if document is not None:
        write_part(document, "backends", rendered(found))


def rendered(found: dict) -> str:  # type: ignore[type-arg]
    header = ["", *(f"{batch} rows" if batch > 1 else "1 row" for batch in BATCHES)]
    by_way: dict[str, list[str]] = {}
    for result in found["results"]:
        whole, gate, experts = (result[name] for name in ("mean_us", "gate_us", "experts_us"))
        by_way.setdefault(result["way"], []).append(f"{whole:,.0f} ({gate:,.0f} + {experts:,.0f})")
    return table(header, [[name, *cells] for name, cells in by_way.items()])


if __name__ == "__main__":
    main()
