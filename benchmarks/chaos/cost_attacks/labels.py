"""Long class labels: a few hundred bytes ask for an answer of hundreds of megabytes."""

import gzip
from functools import partial

import numpy as np

from benchmarks.chaos.harness import known_requests, mixed_traffic
from benchmarks.chaos.harness.attackers import Attack
from benchmarks.chaos.harness.bundles import SMALL
from benchmarks.chaos.harness.server_process import serving
from benchmarks.chaos.harness.verdict import Context, Figures
from benchmarks.engines.random_bundles import write_random

TITLE = "long class labels beside ordinary traffic"
LABEL_CHARACTERS = 500
ROWS, K = 4096, 256
FEW_ROWS = 256  # an answer of 33 MB


def run(context: Context) -> Figures:
    figures = Figures()
    models = context.folder / "models"
    labels = [f"{number:0{LABEL_CHARACTERS}d}" for number in range(SMALL.n_classes)]
    made = write_random(models / "m" / "1", SMALL, labels=labels)
    asked = known_requests.ask({1: made})
    start = partial(serving, models, context.folder / "run")
    attacks = [_attack("500 MB", ROWS), _attack("33 MB", FEW_ROWS, (60,))]
    points = mixed_traffic.attack_each(context, figures, attacks, start, asked)
    mixed_traffic.require(figures, points)
    return figures


def _attack(size: str, rows: int, connections: tuple[int, ...] = (1, 4, 15, 60)) -> Attack:
    hidden = np.zeros((rows, SMALL.hidden_size), np.float16)
    headers = {"Content-Type": "application/x-npy", "Content-Encoding": "gzip"}
    body = gzip.compress(known_requests.npy(hidden), 9, mtime=0)
    request = known_requests.post(f"/models/m/topk?k={K}", body, headers)
    return Attack(f"labels of {size}", request, connections=connections)
