"""Small finished runs that a report can be made of."""

import copy
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.data import run_folder
from trainer.data.files import write_json
from trainer.layer import DSSoftmax

WIDTH = 4
WORDS = ["<unk>", "<eos>", "the", "a&b", "<script>alert(1)</script>", "fig", "gnu", "hat"]
WORDS += ["ink", "jam", "kit", "lip"]
FREQUENCIES = [90, 70, 50, 30, 20, 10, 6, 4, 3, 2, 1, 1]
COMMAND = "dss report there --out here"
FULL = {"valid": {"1": 0.21, "5": 0.41, "10": 0.51}, "test": {"1": 0.22, "5": 0.42, "10": 0.52}}


def tiny_layer(*, dropped: int | None = None) -> DSSoftmax:
    """Three experts; the first four classes are in all of them, the others in one."""
    pairs = [(k, c) for k in range(3) for c in range(12) if c < 4 or c % 3 == k]
    keys = torch.tensor([k * 12 + c for k, c in pairs if c != dropped])
    return DSSoftmax(WIDTH, 12, 3, keys=keys)


def write_layer(folder: Path, layer: DSSoftmax, utilization: list[float], **config: object) -> Path:
    folder.mkdir(parents=True)
    write_json(folder / run_folder.CONFIG, {"task": "vectors", "n_experts": 3, "seed": 0, **config})
    run_folder.save_layer(folder, layer, np.zeros((2, WIDTH), np.float32))
    summary = {
        "task": "vectors",
        "accuracy": 0.2512,
        "full_accuracy": 0.2468,
        "mean_copies": 1.6667,
        "mean_rows": 6.75,
        "flops_speedup": 1.2308,
        "utilization": utilization,
        "seconds": 12.3,
        "on": "validation vectors",
    }
    write_json(folder / run_folder.SUMMARY, summary)
    return folder


def point(method: str, name: str, split: str, seed: int, **more: object) -> dict[str, Any]:
    """A measurement whose every number occurs nowhere else."""
    rng = np.random.default_rng([seed, split == "test"])
    accuracy = np.sort(0.19 + 0.3 * rng.random(3)).round(5).tolist()
    precision = np.sort(0.6 + 0.3 * rng.random(3)).round(5).tolist()
    return {
        "method": method,
        "name": name,
        "dial": {},
        "split": split,
        "chosen": False,
        "paper": None,
        "accuracy": dict(zip(("1", "5", "10"), accuracy, strict=True)),
        "precision": dict(zip(("1", "5", "10"), precision, strict=True)),
        "flops_speedup": round(1 + 90 * rng.random(), 3),
        "latency_us": round(20 + 300 * rng.random(), 2),
        "train_seconds": round(1 + 600 * rng.random(), 2),
        "build_seconds": round(1 + 9 * rng.random(), 2),
    } | more


def tiny_results(corpus: str = "ptb") -> dict[str, Any]:
    def layer(title: str, **more: object) -> dict[str, Any]:
        common = {"paper": None, "keep_one": True, "n_experts": 3, "method": "warm"}
        return {"title": title, "speedup_asked": 34.5, "train_seconds": 101.4, "svd": None} | (
            common | more
        )

    points: list[dict[str, Any]] = [
        {**point("full", "full softmax", s, 1, flops_speedup=1.0), "accuracy": FULL[s]}
        for s in ("valid", "test")
    ]
    for seed, (method, paper) in enumerate(
        [
            ("full-retrained", None),
            ("full-int8", None),
            ("svd", "SVD-10"),
            ("svd", None),
            ("d-softmax", "D-Softmax"),
            ("adaptive", None),
            ("fgd", "FGD-H"),
            ("screening", None),
            ("faiss-ivf", None),
        ],
        start=10,
    ):
        points.append(point(method, f"{method} {seed}", "valid", seed, paper=paper))
        if paper or method == "full-retrained":
            points.append(point(method, f"{method} {seed}", "test", seed, paper=paper, chosen=True))
    layers = {
        "kept": layer("DS-64", paper="DS-64"),
        "free": layer("DS-64*", paper="DS-64*", keep_one=False),
        "grown": layer("DS-64 grown", method="mitosis", n_experts=2),
        "inside": layer("D64+S50", paper="D64+S50", svd={"window": 16, "share": 0.5, "above": 9}),
    }
    for seed, name in enumerate(layers, start=30):
        for searched in (1, 2):
            dial = {"experts_searched": searched}
            points.append(point("ds", name, "valid", 100 * searched + seed, dial=dial))
        points.append(point("ds", name, "test", seed, dial={"experts_searched": 1}, chosen=True))
    points.append({"method": "scann", "skipped": "There is no package for this machine."})
    return {
        "task": "language-model",
        "corpus": corpus,
        "encoder": {
            "corpus": corpus,
            "trained_here": False,
            "valid": {"perplexity": 127.549, "accuracy": FULL["valid"]},
            "test": {"perplexity": 120.536, "accuracy": FULL["test"]},
        },
        "layers": layers,
        "comparison": {
            "n_classes": 12,
            "hidden_size": WIDTH,
            "machine": {"cpu": "An <odd> CPU", "cores": 2},
            "rows": {"valid": 73_760, "test": 82_430},
            "full": copy.deepcopy(FULL),
            "points": points,
        },
        "mitosis": {
            "layer": "grown",
            "peak_memory": 2.07,
            "stages": [
                {
                    "experts": experts,
                    "accuracy": {"1": 0.2 + i, "5": 0.3 + i, "10": 0.4 + i},
                    "flops_speedup": 1.77 * experts,
                    "split": "valid",
                    "peak_memory": 2.07 - i,
                    "rows": 12_345 - experts,
                }
                for experts, i in ((2, 0.011), (4, 0.022))
            ],
            "memory": [
                {"step": step, "experts": 2 if step < 5 else 4, "memory": 2.07 - 0.1 * (step % 5)}
                for step in range(10)
            ],
        },
    }


def write_language_model(folder: Path, results: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    results = tiny_results() if results is None else results
    write_json(
        folder / run_folder.CONFIG, {"task": "language-model", "corpus": "ptb", "units": 211}
    )
    write_json(folder / "results.json", results)
    (folder / "hidden").mkdir()
    (folder / "hidden" / "labels.txt").write_text("".join(f"{word}\n" for word in WORDS))
    np.save(folder / "hidden" / "train.labels.npy", np.repeat(np.arange(12), FREQUENCIES))
    write_layer(folder / "layers" / "kept", tiny_layer(), [0.5, 0.4995, 0.0005])
    return folder


def write_synthetic(folder: Path) -> Path:
    write_layer(folder, tiny_layer(), [0.25, 0.25, 0.5], task="synthetic", size="3x4")
    summary = json.loads((folder / run_folder.SUMMARY).read_text())
    write_json(
        folder / run_folder.SUMMARY,
        {**summary, "task": "synthetic", "size": "3x4", "purity": 0.875},
    )
    return folder


class Parsed(HTMLParser):
    """Tags and attributes of a page, and its visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"

    def sources(self) -> list[str]:
        return [attributes["src"] or "" for tag, attributes in self.tags if tag == "img"]
