"""Small bodies that become large when they are expanded and parsed.

Most are as large as the server allows once they are expanded, and as small before as
`limits.max_expansion` lets them be; the others are a thousandth of what they expand to.
"""

from functools import partial

import numpy as np

from benchmarks.chaos.harness import bundles, gzip_bodies, known_requests, mixed_traffic
from benchmarks.chaos.harness.attackers import Attack
from benchmarks.chaos.harness.server_process import serving
from benchmarks.chaos.harness.verdict import Context, Figures

TITLE = "decoding bombs beside ordinary traffic"
BODY_BYTES = 8 * 2**20  # limits.max_body_bytes
NATIVE, V2 = "/models/m/topk", "/v2/models/m/infer"
JSON = {"Content-Type": "application/json"}
NPY = {"Content-Type": "application/x-npy"}
Connections = tuple[int, ...]
ALL, FEW, MOST = (1, 4, 15, 60), (15, 60), (60,)
QUICK_ATTACKS = 3
ONES = b"1," * (BODY_BYTES // 2 - 100)


def run(context: Context) -> Figures:
    figures = Figures()
    models = context.folder / "models"
    asked = known_requests.ask(bundles.write(models, [1]))
    start = partial(serving, models, context.folder / "run")
    attacks = made()[: QUICK_ATTACKS if context.quick else None]
    points = mixed_traffic.attack_each(context, figures, attacks, start, asked, seconds=2.5)
    if not context.quick:
        several = partial(serving, models, context.folder / "run", "--workers", "2")
        first = Attack(f"{attacks[0].name}, 2 workers", attacks[0].request, connections=(60,))
        points += mixed_traffic.attack_each(
            context, figures, [first], several, asked, workers=2, harmless=False
        )
    mixed_traffic.require(figures, points)
    return figures


def made() -> list[Attack]:
    rows = filled(b'{"inputs":[', b"[],", b"[]]}")
    return [
        _bomb("empty rows", NATIVE, rows, JSON),
        _attack("8 MiB of empty rows in 8 KB", NATIVE, gzip_bodies.smallest(rows), JSON),
        _bomb("empty rows in v2", V2, v2_of(b"[],", b"[]"), JSON, FEW),
        _attack(
            "1 MiB of empty rows in 1 KB", NATIVE, gzip_bodies.smallest(small_rows()), JSON, FEW
        ),
        _bomb("one row of numbers", NATIVE, filled(b'{"inputs":[[', b"1,", b"1]]}"), JSON, MOST),
        _bomb("spaces", NATIVE, filled(b"", b" ", b"{}"), JSON, MOST),
        _bomb("zero bytes", NATIVE, filled(b"", b"\0", b""), JSON, MOST),
        _bomb("nested lists", NATIVE, nested(), JSON, MOST),
        _bomb("one string", NATIVE, filled(b'{"inputs":"', b"a", b'"}'), JSON, MOST),
        _bomb("unknown fields", NATIVE, filled(b"{", b'"x":[],', b'"x":[]}'), JSON, MOST),
        _bomb("tensors without end in v2", V2, filled(b'{"inputs":[', b"{},", b"{}]}"), JSON, MOST),
        _bomb("a shape without end in v2", V2, v2_shape(ONES), JSON, MOST),
        Attack(
            "a shape of 10^18 rows in v2",
            known_requests.post(V2, v2_shape(b"1000000000000000000,"), JSON),
            connections=MOST,
        ),
        _bomb("4096 float16 rows, too wide", NATIVE, wide_rows(), NPY, MOST),
    ]


def _bomb(
    name: str, path: str, body: bytes, headers: dict[str, str], connections: Connections = ALL
) -> Attack:
    packed = gzip_bodies.allowed(body)
    return _attack(f"8 MiB of {name}", path, packed, headers, connections)


def _attack(
    name: str, path: str, packed: bytes, headers: dict[str, str], connections: Connections = ALL
) -> Attack:
    request = known_requests.post(path, packed, headers | {"Content-Encoding": "gzip"})
    return Attack(name, request, connections=connections)


def filled(before: bytes, piece: bytes, after: bytes, most: int = BODY_BYTES) -> bytes:
    return before + piece * ((most - len(before) - len(after)) // len(piece)) + after


def v2_of(piece: bytes, last: bytes) -> bytes:
    tensor = b'{"inputs":[{"name":"hidden","datatype":"FP32","shape":[1,32],"data":['
    return filled(tensor, piece, last + b"]}]}")


def v2_shape(dimensions: bytes) -> bytes:
    tensor = b'{"inputs":[{"name":"hidden","datatype":"FP32","data":[0],"shape":['
    return tensor + dimensions + b"32]}]}"


def small_rows() -> bytes:
    return filled(b'{"inputs":[', b"[],", b"[]]}", 2**20)


def nested() -> bytes:
    before = b'{"inputs":'
    depth = (BODY_BYTES - len(before) - 1) // 2
    return before + b"[" * depth + b"]" * depth + b"}"


def wide_rows() -> bytes:
    width = BODY_BYTES // 2 // 4096 - 1  # the file's own head needs room too
    return known_requests.npy(np.zeros((4096, width), np.float16))
