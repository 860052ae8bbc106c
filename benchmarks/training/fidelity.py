"""What layers of a head's own rows keep of its answers, on the capture's test split.

Nothing was learned, chosen or calibrated on these rows. Beside each layer stands its untrained
start: clusters, and the classes that the head answers in each, at the same budget.

    dss train --capture captured/ptb --speedup 64 --no-keep-one --out runs/ptb
    dss export runs/ptb models/ptb/1
    python -m benchmarks.training.fidelity --title "Penn Treebank" --capture captured/ptb \
        --layer runs/ptb models/ptb/1

Results go to benchmarks/results/fidelity.json and the table of docs/results.md.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.document import table, write_part
from benchmarks.engines.report import measured_on
from service.system.machine import machine
from trainer.baselines.measurement import spread
from trainer.capture.folder import Captured, read_capture
from trainer.data import run_folder
from trainer.data.files import write_json
from trainer.evaluation.measure import evaluate

RESULTS, PAGE = Path("benchmarks/results/fidelity.json"), Path("docs/results.md")
KEPT = (
    "keep_one",
    "speedup_asked",
    "reachable",
    "start_accuracy_at",
    "kept",
)
MEASURED = (
    "precision",
    "accuracy",
    "full_accuracy",
    "flops_speedup",
    "perplexity",
    "full_perplexity",
    "log_prob_error",
    "rows",
)


def measure(captured: Captured, run: Path, bundle: Path, rows: int) -> dict[str, Any]:
    """A layer's figures on test rows, evenly spread over the split."""
    if captured.test_hidden is None or captured.test_labels is None:
        raise click.ClickException(f"{captured.folder} has no test split.")
    hidden = np.load(captured.test_hidden, mmap_mode="r")
    places = spread(len(hidden), rows)
    with tempfile.TemporaryDirectory() as folder:
        chosen, labels = Path(folder) / "hidden.npy", Path(folder) / "labels.npy"
        np.save(chosen, hidden[places])
        np.save(labels, np.load(captured.test_labels)[places])
        found = evaluate(bundle, chosen, labels, head=captured.head, bias=captured.bias)
    summary = json.loads((run / run_folder.SUMMARY).read_text())
    figures = {name: summary[name] for name in KEPT} | {name: found[name] for name in MEASURED}
    # Of a run that was given the head's answers by another one, the seconds say nothing.
    seconds = summary["seconds"] if "teacher" in summary["phases"] else None
    return {"n_experts": len(summary["utilization"]), "seconds": seconds, **figures}


def markdown(results: dict[str, dict[str, Any]]) -> str:
    header = ["head", "experts", "keeps all", "FLOPs speedup", "precision at 1 / 5 / 10",
              "untrained start, at 1 / 10", "log-probability off by", "perplexity, of the head",
              "trained in"]  # fmt: skip
    rows = [
        _row(title, found, layer) for title, found in results.items() for layer in found["layers"]
    ]
    last = list(results.values())[-1]
    return f"{table(header, rows)}\n\n{measured_on(last)}."


def _row(title: str, found: dict[str, Any], layer: dict[str, Any]) -> list[str]:
    precision, start = layer["precision"], layer["reachable"]
    shape = f"{found['n_classes']:,} x {found['hidden_size']}"
    return [
        f"{title}, {shape}",
        str(layer["n_experts"]),
        "yes" if layer["keep_one"] else "no",
        f"{layer['flops_speedup']:.1f}x",
        " / ".join(f"{precision[k]:.4f}" for k in precision),
        f"{start['1']:.4f} / {start['10']:.4f}",
        f"{layer['log_prob_error']:.3f}",
        f"{layer['perplexity']:.2f}, {layer['full_perplexity']:.2f}",
        "-" if layer["seconds"] is None else f"{layer['seconds']:.0f} s",
    ]


@click.command()
@click.option("--title", help="Of the head.")
@click.option("--capture", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--layer", "layers", nargs=2, multiple=True, type=click.Path(path_type=Path),
              help="A run and the bundle that was exported from it.")  # fmt: skip
@click.option("--rows", default=20_000, show_default=True, help="Of the test split, at most.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--document", type=click.Path(path_type=Path), default=PAGE, show_default=True)
def main(
    title: str | None,
    capture: Path | None,
    layers: tuple[tuple[Path, Path], ...],
    rows: int,
    out: Path,
    document: Path,
) -> None:
    """Measure layers and fill in the table; without --title only the table is written."""
    results: dict[str, dict[str, Any]] = json.loads(out.read_text()) if out.exists() else {}
    if title is not None:
        if capture is None or not layers:
            raise click.UsageError("--title needs --capture and --layer.")
        captured = read_capture(capture)
        results[title] = {
            "n_classes": captured.n_classes,
            "hidden_size": captured.hidden_size,
            "machine": machine("numpy", "torch"),
            "layers": [measure(captured, run, bundle, rows) for run, bundle in layers],
        }
        write_json(out, results)
    body = markdown(results)
    write_part(document, "fidelity", body)
    click.echo(body)


if __name__ == "__main__":
    main()
