"""One request that keeps the engine busy for seconds, sent in 10 KB.

200,000 classes of 256 numbers: 4,096 query rows that search every expert for 256 answers each.
"""

import gzip
import json
from functools import partial

import numpy as np

from benchmarks.chaos.harness import bundles, known_requests, mixed_traffic
from benchmarks.chaos.harness.attackers import Attack
from benchmarks.chaos.harness.server_process import serving
from benchmarks.chaos.harness.verdict import Context, Figures
from benchmarks.engines.random_bundles import Shape

TITLE = "long engine calls beside ordinary traffic"
SHAPE = Shape(n_classes=200_000, n_experts=64, held=3125, hidden_size=256)
ROWS, K = 4096, 256
GZIP = {"Content-Encoding": "gzip"}
DEADLINE = {"DSS-Timeout": "0.05"}
PATIENCE_SECONDS = 0.1  # of those who leave


def run(context: Context) -> Figures:
    figures = Figures()
    models = context.folder / "models"
    asked = known_requests.ask(bundles.write(models, [1], SHAPE))
    start = partial(serving, models, context.folder / "run")
    attacks = made()[: context.count(2, 3)]
    mixed_traffic.require(
        figures, mixed_traffic.attack_each(context, figures, attacks, start, asked)
    )
    return figures


def made() -> list[Attack]:
    npy = gzip.compress(known_requests.npy(_rows()), 9, mtime=0)
    path = f"/models/m/topk?k={K}&experts={SHAPE.n_experts}"
    headers = {"Content-Type": "application/x-npy"} | GZIP
    words = "4,096 rows x all experts"
    return [
        Attack(words, known_requests.post(path, npy, headers)),
        Attack(
            f"{words}, who leave after 0.1 s",
            known_requests.post(path, npy, headers | DEADLINE),
            patience=PATIENCE_SECONDS,
        ),
        Attack(f"{words}, v2", _v2(), connections=(15, 60)),
    ]


def _rows() -> np.ndarray:
    return np.zeros((ROWS, SHAPE.hidden_size), np.float16)


def _v2() -> bytes:
    rows = _rows()
    tensor = {
        "name": "hidden",
        "datatype": "FP16",
        "shape": list(rows.shape),
        "parameters": {"binary_data_size": rows.nbytes},
    }
    asked = {"k": K, "experts": SHAPE.n_experts, "binary_data_output": True}
    head = json.dumps({"inputs": [tensor], "parameters": asked}).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }
    body = gzip.compress(head + rows.tobytes(), 9, mtime=0)
    return known_requests.post("/v2/models/m/infer", body, headers | GZIP)
