"""The demo bundle against a full scan of the same classes, in one run, one thread.

The full softmax is one ONNX Runtime call: a matrix product over all classes and a top-k. The engine
is what the service runs. Writes benchmarks/results/demo.json.

    make bench
"""

import json
from pathlib import Path

import numpy as np

from service import bundle
from service.bundle.format import SAMPLES
from service.engine import Engine
from service.system.machine import machine
from trainer.data.arrays import Head
from trainer.evaluation import onnx_scan
from trainer.evaluation.timing import timed

DEMO = Path("models/demo/1")
RESULTS = Path("benchmarks/results/demo.json")
BATCHES = (1, 8, 32, 256)
K = 10


def main() -> None:
    demo = bundle.read(DEMO)
    engine = Engine(demo)
    full = onnx_scan.full(full_head(demo))
    rng = np.random.default_rng(0)
    samples = np.load(DEMO / SAMPLES, allow_pickle=False)  # [S,D]
    rows = []
    for batch in BATCHES:
        # Rows near the samples, so that all experts get traffic as they do in the test set.
        chosen = samples[rng.integers(len(samples), size=batch)]
        hidden = (chosen + 0.01 * rng.normal(size=chosen.shape)).astype(np.float32)
        sparse_us, full_us = timed(
            lambda hidden=hidden: engine.topk(hidden, K), lambda hidden=hidden: full.topk(hidden, K)
        )
        rows.append(
            {
                "batch": batch,
                "sparse_us": round(sparse_us, 1),
                "full_us": round(full_us, 1),
                "ratio": round(full_us / sparse_us, 2),
            }
        )
    results = {
        "command": "make bench",
        "machine": machine("onnxruntime", "numpy", "numba"),
        "n_classes": demo.manifest.n_classes,
        "flops_speedup": demo.manifest.training.flops_speedup,
        "k": K,
        "median_microseconds_per_call": rows,
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))  # noqa: T201


def full_head(demo: bundle.Bundle) -> Head:
    """The rows of all experts as one matrix [N,D]."""
    weight = np.zeros((demo.manifest.n_classes, demo.manifest.hidden_size), np.float32)
    for expert, model in enumerate(demo.expert_models):
        if model is not None:
            weight[demo.expert_classes(expert)] = demo.expert_weight(expert)
    return Head(weight, None)


if __name__ == "__main__":
    main()
