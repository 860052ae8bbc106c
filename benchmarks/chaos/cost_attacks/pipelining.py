"""Connections that send thousands of requests without waiting for answers."""

from collections.abc import Sequence
from functools import partial

from benchmarks.chaos.harness import bundles, known_requests, mixed_traffic
from benchmarks.chaos.harness.answer_check import Question
from benchmarks.chaos.harness.attackers import Attack
from benchmarks.chaos.harness.server_process import serving
from benchmarks.chaos.harness.verdict import Context, Figures

TITLE = "pipelined requests beside ordinary traffic"
PIPELINE_BYTES = 256 * 2**10
FEW = (15, 60)
PIECE_BYTES = 32 * 2**10  # less than limits.max_head_bytes
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def run(context: Context) -> Figures:
    figures = Figures()
    models = context.folder / "models"
    asked = known_requests.ask(bundles.write(models, [1]))
    start = partial(serving, models, context.folder / "run")
    points = mixed_traffic.attack_each(context, figures, made(asked), start, asked)
    mixed_traffic.require(figures, points)
    return figures


def made(asked: Sequence[Question]) -> list[Attack]:
    post = next(question.request for question in asked if question.kind == "json")
    return [
        Attack("256 KB of GET /", pipeline(GET), reads="all"),
        Attack("256 KB of GET /, in pieces", pipeline(GET), reads="all", piece=PIECE_BYTES),
        Attack(
            "256 KB of POST /topk, in pieces",
            pipeline(post),
            reads="all",
            piece=PIECE_BYTES,
            connections=FEW,
        ),
        Attack(
            "256 KB of GET /, answers left unread", pipeline(GET), reads="status", connections=FEW
        ),
    ]


def pipeline(request: bytes) -> bytes:
    """The last one asks the server to end the connection."""
    last = request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    return request * (PIPELINE_BYTES // len(request)) + last
