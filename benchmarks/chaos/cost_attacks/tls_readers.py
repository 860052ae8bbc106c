"""Clients that ask for large answers over TLS and do not read them."""

import gzip
from functools import partial

import numpy as np

from benchmarks.chaos.harness import bundles, certificates, known_requests, mixed_traffic
from benchmarks.chaos.harness.attackers import Attack
from benchmarks.chaos.harness.load import client_context
from benchmarks.chaos.harness.server_process import serving
from benchmarks.chaos.harness.verdict import MIB, Context, Figures

TITLE = "TLS clients that do not read, beside ordinary traffic"
READ_SECONDS, SLACK_SECONDS = 2.0, 2.5
K = 256
ROWS = {"36 MB": 4096, "9 MB": 1024}  # of an answer, as JSON


def run(context: Context) -> Figures:
    figures = Figures()
    models = context.folder / "models"
    asked = known_requests.ask(bundles.write(models, [1]))
    issued = certificates.issue(context.folder / "tls")
    start = partial(
        serving,
        models,
        context.folder / "run",
        *issued.flags,
        env={"DSS_LIMITS__READ_SECONDS": str(READ_SECONDS)},
        tls=client_context(issued.ca),
    )
    attacks = made()[: context.count(1, 2)]
    # Long enough for the first ones to be cut off, and for others to take their place.
    seconds = READ_SECONDS + SLACK_SECONDS + 2.0
    points = mixed_traffic.attack_each(
        context, figures, attacks, start, asked, ca=issued.ca, seconds=seconds, quick=seconds
    )
    mixed_traffic.require(figures, points)
    unread = [point for point in points if point.held_seconds is not None]
    longest = max((point.held_seconds or 0.0 for point in unread), default=0.0)
    limit = READ_SECONDS + SLACK_SECONDS
    words = f"those who do not read are cut off within {READ_SECONDS:g} s and a little"
    figures.require(words, longest <= limit, f"{longest:.1f} s")
    after = max(point.memory_after for point in points)
    words = "once they are gone, less than 512 MB above idle is kept"
    figures.require(words, after <= mixed_traffic.MEMORY_BYTES, f"{after / MIB:.0f} MB")
    figures.facts["points with unread answers"] = len(unread)
    return figures


def made() -> list[Attack]:
    attacks = []
    for (size, rows), connections in zip(ROWS.items(), ((1, 4, 15, 60), (60,)), strict=True):
        hidden = np.zeros((rows, bundles.SMALL.hidden_size), np.float16)
        headers = {"Content-Type": "application/x-npy", "Content-Encoding": "gzip"}
        body = gzip.compress(known_requests.npy(hidden), 9, mtime=0)
        request = known_requests.post(f"/models/m/topk?k={K}", body, headers)
        attacks.append(
            Attack(
                f"answers of {size} left unread", request, reads="status", connections=connections
            )
        )
    return attacks
