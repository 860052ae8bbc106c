"""One request that keeps the engine busy for seconds, sent in 11 KB.

200,000 classes of 256 numbers; thousands of query rows search every expert for 256 answers each: as
many as the limits allow, and more.
"""

import json
from functools import partial

import numpy as np

from benchmarks.chaos.harness import bundles, gzip_bodies, known_requests, mixed_traffic
from benchmarks.chaos.harness.attackers import Attack
from benchmarks.chaos.harness.server_process import serving
from benchmarks.chaos.harness.verdict import Context, Figures
from benchmarks.engines.random_bundles import Shape

TITLE = "long engine calls beside ordinary traffic"
SHAPE = Shape(n_classes=200_000, n_experts=64, held=3125, hidden_size=256)
ROWS, K = 4096, 256
ALLOWED_ROWS = 2000  # times 200,000 classes: less than limits.max_scores
DEADLINE = {"DSS-Timeout": "0.05"}
PATIENCE_SECONDS = 0.1  # of those who leave


def run(context: Context) -> Figures:
    figures = Figures()
    models = context.folder / "models"
    asked = known_requests.ask(bundles.write(models, [1], SHAPE))
    start = partial(serving, models, context.folder / "run")
    attacks = made()[: context.count(2, 4)]
    mixed_traffic.require(
        figures, mixed_traffic.attack_each(context, figures, attacks, start, asked)
    )
    return figures


def made() -> list[Attack]:
    path = f"/models/m/topk?k={K}&experts={SHAPE.n_experts}"
    headers = {"Content-Type": "application/x-npy", "Content-Encoding": "gzip"}
    large = gzip_bodies.smallest(known_requests.npy(_rows(ROWS)))
    allowed = gzip_bodies.allowed(known_requests.npy(_rows(ALLOWED_ROWS)))
    return [
        Attack("2,000 rows x all experts", known_requests.post(path, allowed, headers)),
        Attack(
            "2,000 rows x all experts, who leave after 0.1 s",
            known_requests.post(path, allowed, headers | DEADLINE),
            patience=PATIENCE_SECONDS,
        ),
        Attack(
            "4,096 rows x all experts in 2 KB",
            known_requests.post(path, large, headers),
            connections=(15, 60),
        ),
        Attack("2,000 rows x all experts, v2", _v2(), connections=(60,)),
    ]


def _rows(count: int) -> np.ndarray:
    return np.zeros((count, SHAPE.hidden_size), np.float16)


def _v2() -> bytes:
    rows = _rows(ALLOWED_ROWS)
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
    body = gzip_bodies.allowed(head + rows.tobytes())
    return known_requests.post("/v2/models/m/infer", body, headers | {"Content-Encoding": "gzip"})
