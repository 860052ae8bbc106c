"""The layers of a plan on a task's hidden vectors, beside every other method: one results.json."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.baselines.compare import compare
from trainer.baselines.method import Options
from trainer.data import run_folder as runs
from trainer.data.arrays import Head, Vectors, open_head, open_vectors
from trainer.data.files import write_json
from trainer.export.export import export
from trainer.export.svd_softmax import Approximation
from trainer.tasks.language_model import hidden_states
from trainer.tasks.language_model.plan import Plan, PlannedLayer
from trainer.training import from_vectors

PRESETS = Path(__file__).parent
BUNDLES = "bundles"
COMPARISON = "comparison"  # folder of what is finished of it


def preset(corpus: str) -> Path:
    return PRESETS / f"{corpus}.toml"


def run(
    folder: Path,
    plan: Plan,
    options: Options,
    *,
    threads: int | None = None,
    methods: list[str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train, export and compare what is not there yet; returns what results.json holds."""
    bundles = train_layers(folder, plan, threads=threads, say=say)
    files = folder / hidden_states.FOLDER
    head = open_head(files / hidden_states.HEAD)
    training, valid, test = (vectors_of(files, split, head) for split in ("train", "valid", "test"))
    comparison = compare(
        training,
        head,
        valid,
        test,
        folder / COMPARISON,
        bundles=bundles,
        methods=methods,
        options=options,
        say=say,
    )
    results = {
        "task": "language-model",
        "corpus": json.loads((folder / runs.CONFIG).read_text())["corpus"],
        "encoder": json.loads((folder / hidden_states.FIGURES).read_text()),
        "layers": {name: layer_facts(folder, plan, name) for name in plan},
        "comparison": comparison,
        "mitosis": growth(folder, plan),
    }
    write_json(folder / runs.RESULTS, results)
    return results


def train_layers(
    folder: Path,
    plan: Plan,
    *,
    threads: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Path]:
    """Train and export the layers that are not there yet: their bundles by name.

    Reads training and validation words only.
    """
    files = folder / hidden_states.FOLDER
    head = open_head(files / hidden_states.HEAD)
    training, valid = (vectors_of(files, split, head) for split in ("train", "valid"))
    bundles = {}
    for name, planned in plan.items():
        if planned.of is None:
            summary = train_layer(folder, name, planned, training, valid, head, threads)
            say(line(planned, summary))
        bundles[name] = export_layer(folder, name, planned)
    return bundles


def vectors_of(files: Path, split: str, head: Head) -> Vectors:
    n_classes, hidden_size = head.weight.shape
    return open_vectors(
        hidden_states.rows_file(files, split),
        hidden_states.labels_file(files, split),
        n_classes=n_classes,
        hidden_size=hidden_size,
    )


def train_layer(
    folder: Path,
    name: str,
    planned: PlannedLayer,
    training: Vectors,
    valid: Vectors,
    head: Head,
    threads: int | None,
) -> dict[str, Any]:
    run_folder, files = folder / runs.LAYERS / name, folder / hidden_states.FOLDER
    if (run_folder / runs.SUMMARY).exists():
        return json.loads((run_folder / runs.SUMMARY).read_text())
    names = {
        "hidden": str(hidden_states.rows_file(files, "train")),
        "labels": str(hidden_states.labels_file(files, "train")),
        "head": str(files / hidden_states.HEAD),
    }
    return from_vectors.run(
        planned.config(threads=threads),
        names,
        training,
        valid,
        head,
        run_folder,
        resume=(run_folder / runs.CONFIG).exists(),
        normalisers=files / from_vectors.NORMALISERS,
    )


def export_layer(folder: Path, name: str, planned: PlannedLayer) -> Path:
    destination = folder / BUNDLES / name / "1"
    if not destination.exists():
        svd = planned.svd
        export(
            folder / runs.LAYERS / (planned.of or name),
            destination,
            folder / hidden_states.FOLDER / runs.LABELS,
            None if svd is None else Approximation(**asdict(svd)),
        )
    return destination


def layer_facts(folder: Path, plan: Plan, name: str) -> dict[str, Any]:
    planned = plan[name]
    trained = folder / runs.LAYERS / (planned.of or name)
    config = json.loads((trained / runs.CONFIG).read_text())
    summary = json.loads((trained / runs.SUMMARY).read_text())
    return {
        "title": planned.title,
        "paper": planned.paper,
        "of": planned.of,
        "keep_one": config["keep_one"],
        "n_experts": config["n_experts"],
        "method": config["method"],
        "speedup_asked": config["speedup"],
        "train_seconds": summary["seconds"],
        "svd": None if planned.svd is None else asdict(planned.svd),
    }


def growth(folder: Path, plan: Plan) -> dict[str, Any] | None:
    """How the first layer that was learned by mitosis grew."""
    for name, planned in plan.items():
        if planned.settings.get("method") == "mitosis":
            grown = json.loads((folder / runs.LAYERS / name / runs.GROWTH).read_text())
            stages = [{**stage, "split": "valid"} for stage in grown["stages"]]
            return {"layer": name, **grown, "stages": stages}
    return None


def line(planned: PlannedLayer, summary: dict[str, Any]) -> str:
    at = " ".join(f"{share:.4f}" for share in summary["accuracy_at"].values())
    full = " ".join(f"{share:.4f}" for share in summary["full_accuracy_at"].values())
    return (
        f"{planned.title:<14} {at} (full softmax {full}, on {summary['on']}),"
        f" {summary['flops_speedup']:.2f}x in {summary['seconds']:.0f} s"
        + (", kept as it began" if summary.get("kept") == "start" else "")
    )
