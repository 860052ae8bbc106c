"""The demo bundle against a full scan of the same classes, in one run, one thread.

Both sides use ONNX Runtime: the full softmax is one matrix product over all classes and a top-k in
the same graph. Writes benchmarks/results/demo.json.

    make bench
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import numpy_helper

from service import bundle, graphs
from service.engine import Engine
from trainer.machine import machine
from trainer.timing import timed

DEMO = Path("models/demo/1")
RESULTS = Path("benchmarks/results/demo.json")
BATCHES = (1, 8, 32, 256)
K = 10


def main() -> None:
    demo = bundle.read(DEMO)
    engine = Engine(demo)
    full = full_scan(demo)
    rng = np.random.default_rng(0)
    samples = np.load(DEMO / bundle.SAMPLES, allow_pickle=False)  # [S,D]
    rows = []
    for batch in BATCHES:
        # Rows near the samples, so that all experts get traffic as they do in the test set.
        chosen = samples[rng.integers(len(samples), size=batch)]
        hidden = (chosen + 0.01 * rng.normal(size=chosen.shape)).astype(np.float32)
        sparse_us, full_us = timed(
            lambda hidden=hidden: engine.topk(hidden, K), lambda hidden=hidden: full(hidden)
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
        "machine": machine("onnxruntime", "numpy"),
        "n_classes": demo.manifest.n_classes,
        "flops_speedup": demo.manifest.training.flops_speedup,
        "k": K,
        "median_microseconds_per_call": rows,
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))  # noqa: T201


def full_scan(demo: bundle.Bundle) -> Callable[[NDArray[np.float32]], object]:
    """All classes in one expert graph: gate value 1, nothing absent."""
    weight = np.zeros((demo.manifest.n_classes, demo.manifest.hidden_size), np.float32)  # [N,D]
    for expert, model in enumerate(demo.expert_models):
        if model is not None:
            initializers = onnx.load_model_from_string(model).graph.initializer
            tensor = next(t for t in initializers if t.name == "W")
            weight[demo.expert_classes(expert)] = numpy_helper.to_array(tensor)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        graphs.expert_graph(weight, len(weight)), options, providers=["CPUExecutionProvider"]
    )
    k = np.array([K])

    def run(hidden: NDArray[np.float32]) -> object:
        ones = np.ones((len(hidden), 1), np.float32)
        return session.run(None, {"hidden": hidden, "gate": ones, "k": k})

    return run


if __name__ == "__main__":
    main()
