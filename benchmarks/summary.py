"""The tables of README.md and docs/results.md, rendered from benchmarks/results; measures nothing.

    python -m benchmarks.summary

A row that compares has the precision of what it compares: the share of the full softmax's own first
classes that an answer holds.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.document import table, write_part
from benchmarks.engines.contestants import OURS, PEER
from benchmarks.engines.ratios import (
    PRECISE,
    REFERENCE,
    Point,
    Run,
    fastest,
    microseconds,
    microseconds_in_batch,
)
from benchmarks.engines.report import measured_on, time
from trainer.report import numbers

RESULTS = Path("benchmarks/results")
README, PAGE = Path("README.md"), Path("docs/results.md")
SHORTEST = "WikiText-2"  # the comparison that README shows
ABLATIONS = {
    "lasso": "class lasso",
    "expert-lasso": "expert lasso",
    "both-lassos": "both lassos",
    "balance": "balance",
}


def main() -> None:
    for document, parts in rendered(RESULTS).items():
        for name, body in parts.items():
            write_part(document, name, body)


def rendered(results: Path) -> dict[Path, dict[str, str]]:
    """By document and by the name of its marks what stands between them."""
    engines = _read(results / "engines.json")
    synthetic = _read(results / "synthetic.json")
    language_models = _read(results / "language-model.json")["runs"]
    return {
        README: {"summary": engine_table(engines[SHORTEST])},
        PAGE: {
            "engines": "\n\n".join(_engines(title, run) for title, run in engines.items()),
            "synthetic": synthetic_table(synthetic),
            "ablations": ablation_table(synthetic),
            "language-models": numbers.markdown(language_models),
            "paper": "\n\n".join(paper_table(run) for run in language_models),
        },
    }


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


# --- engines -----------------------------------------------------------------------------------


def _engines(title: str, run: Run) -> str:
    about = (
        f"{title}, {run['n_classes']:,} classes, {run['hidden_size']} numbers in a hidden vector,"
        f" {run['rows']:,} test rows:"
    )
    return "\n\n".join([about, engine_table(run), f"{measured_on(run)}."])


def engine_table(run: Run) -> str:
    """Full scans, the fastest peer at two precisions, and every layer with one expert searched."""
    header = ["", "one row, us", "a row of 256, us", "precision at 1 / 10"]
    header += ["label accuracy at 1 / 10"]
    return table(header, [_row(name, point) for name, point in chosen(run)])


def chosen(run: Run) -> list[tuple[str, Point]]:
    points = run["contestants"]
    full = [point for point in points if point["name"] in (REFERENCE, "ONNX Runtime int8")]
    layers = [
        point
        for point in points
        if point["kind"] == OURS
        and point["backend"] == "compiled"
        and point["dial"]["experts"] == 1
    ]
    least = min(layers, key=lambda point: point["precision"]["1"])["precision"]
    peers = [point for point in points if point["kind"] == PEER]
    precise = fastest([peer for peer in peers if peer["precision"]["1"] >= PRECISE])
    equal = fastest(
        [peer for peer in peers if all(peer["precision"][k] >= least[k] for k in ("1", "10"))]
    )
    found = [(f"full scan, {point['name']}", point) for point in full]
    if precise is not None:
        found.append((f"{precise['name']}, the fastest peer of precision {PRECISE}", precise))
    if equal is not None:
        found.append((f"{equal['name']}, the fastest peer as precise as the layers", equal))
    return found + [(_layer(point["bundle"]), point) for point in layers]


def _layer(bundle: str) -> str:
    """As the tables name it: wt2-DS-64-star-fp16 is DS-64*, fp16."""
    name = bundle.removeprefix("wt2-").replace("-star", "*")
    for precision in ("fp16", "int8"):
        name = name.replace(f"-{precision}", f", {precision}")
    return name


def _row(name: str, point: Point) -> list[str]:
    precision, accuracy = point["precision"], point["accuracy"]
    return [
        name,
        time(microseconds(point)),
        time(microseconds_in_batch(point)),
        f"{precision['1']:.3f} / {precision['10']:.3f}",
        f"{accuracy['1']:.4f} / {accuracy['10']:.4f}",
    ]


# --- the paper's experiments -------------------------------------------------------------------


def synthetic_table(results: dict[str, Any]) -> str:
    header = ["size", "seeds", "label accuracy", "full softmax, trained alike"]
    header += ["classes in exactly their expert", "copies per class", "FLOPs speedup", "training"]
    by_size: dict[str, list[dict[str, Any]]] = {}
    for run in results["runs"]:
        by_size.setdefault(run["size"], []).append(run)
    return table(
        header,
        [
            [
                size.replace("x", " x "),
                str(len(runs)),
                _range(runs, "accuracy", ".4f"),
                _range(runs, "full_accuracy", ".4f"),
                _range(runs, "purity", ".2f"),
                _range(runs, "mean_copies", ".2f"),
                _range(runs, "flops_speedup", ".2f") + "x",
                _range([learning_time(run) for run in runs], "seconds", ".0f") + " s",
            ]
            for size, runs in by_size.items()
        ],
    )


def learning_time(run: dict[str, Any]) -> dict[str, Any]:
    """Of the layer alone: where phases are recorded, `seconds` are those of the whole command."""
    return {"seconds": run.get("phases", {}).get("learning", run["seconds"])}


def ablation_table(results: dict[str, Any]) -> str:
    header = ["left out", "label accuracy", "classes in exactly their expert"]
    header += ["copies per class", "FLOPs speedup"]
    return table(
        header,
        [
            [
                ABLATIONS[run["without"]],
                f"{run['accuracy']:.4f}",
                f"{run['purity']:.2f}",
                f"{run['mean_copies']:.2f}",
                f"{run['flops_speedup']:.2f}x",
            ]
            for run in results["ablations"]
        ],
    )


def _range(runs: list[dict[str, Any]], key: str, form: str) -> str:
    least, most = (format(pick(run[key] for run in runs), form) for pick in (min, max))
    return least if least == most else f"{least} to {most}"


def paper_table(run: dict[str, Any]) -> str:
    """The methods of the paper's tables 1 and 2 that were measured here too."""
    header = ["method", "paper: accuracy at 1", "FLOPs speedup", "here"]
    header += ["accuracy at 1", "precision at 1 / 10", "FLOPs speedup", "query"]
    methods = {row["method"]: row for name in ("1", "2") for row in run["tables"][name]}
    rows = [
        [
            method,
            f"{row['published']['accuracy']['1']:.3f}",
            _times(row["published"]["flops_speedup"]),
            ours["title"],
            f"{ours['accuracy']['1']:.3f}",
            _precision(ours),
            _times(ours["flops_speedup"]),
            "" if ours["latency_us"] is None else f"{ours['latency_us']:,.0f} us",
        ]
        for method, row in methods.items()
        for ours in row["ours"]
    ]
    return f"{numbers.CORPORA[run['corpus']]}:\n\n{table(header, rows)}"


def _precision(measured: dict[str, Any]) -> str:
    found = measured["precision"] or {"1": 1.0, "10": 1.0}  # the full softmax itself has none
    return f"{found['1']:.3f} / {found['10']:.3f}"


def _times(speedup: float | None) -> str:
    return "1x" if speedup is None else f"{speedup:.2f}x"


if __name__ == "__main__":
    main()
