"""Requests as bytes, with the answers that engines of all served versions give.

B rows, D hidden, k answers.
"""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.chaos.harness.answer_check import END, Question, Reply
from service.bundle import Bundle
from service.engine import Engine

Rows = NDArray[np.float32]  # [B,D]
KINDS = ("json", "npy", "v2", "v2-binary")


def ask(
    bundles: Iterable[tuple[int, Bundle]] | Mapping[int, Bundle],
    *,
    kinds: Sequence[str] = KINDS,
    count: int = 64,
    rows: Sequence[int] = (1, 2, 5),
    k: int = 5,
    model: str = "m",
    seed: int = 0,
) -> list[Question]:
    """Different questions, answered beforehand by an engine of every version."""
    rng = np.random.default_rng(seed)
    pairs = bundles.items() if isinstance(bundles, Mapping) else bundles
    asked: list[tuple[str, Rows]] = []
    expected: list[dict[int, list[Reply]]] = [{} for _ in range(count)]
    for version, bundle in pairs:
        engine = Engine(bundle)  # one at a time: they may be many
        for number in range(count):
            if len(asked) == number:
                shape = (rows[number % len(rows)], engine.hidden_size)
                hidden = rng.normal(size=shape).astype(np.float32)
                asked.append((kinds[number % len(kinds)], hidden))
            reply = reply_of(engine, version, asked[number][1], k)
            expected[number].setdefault(version, []).append(reply)
    return [
        Question(kind, request(kind, hidden, k, model), replies)
        for (kind, hidden), replies in zip(asked, expected, strict=True)
    ]


def reply_of(engine: Engine, version: int, hidden: Rows, k: int, experts: int = 1) -> Reply:
    answer = engine.topk(hidden, k, experts)
    return Reply(
        version,
        np.asarray(answer.classes, np.int64),
        np.asarray(answer.log_probs, np.float64),
        np.asarray(answer.experts, np.int64),
        np.asarray(answer.gates, np.float64),
    )


# --- requests --------------------------------------------------------------------------------


def request(kind: str, hidden: Rows, k: int, model: str | None = "m", experts: int = 1) -> bytes:
    body, path, headers = content(kind, hidden, k, model, experts)
    return post(path, body, headers)


def content(
    kind: str, hidden: Rows, k: int, model: str | None = "m", experts: int = 1
) -> tuple[bytes, str, dict[str, str]]:
    """Body, path and headers of a request."""
    native = f"/models/{model}/topk" if model else "/topk"
    if kind == "json":
        document = {"inputs": hidden.tolist(), "k": k, "experts": experts}
        return json.dumps(document).encode(), native, {"Content-Type": "application/json"}
    if kind == "npy":
        headers = {"Content-Type": "application/x-npy", "Accept": "application/x-npy"}
        return npy(hidden), f"{native}?k={k}&experts={experts}", headers
    path = f"/v2/models/{model}/infer"
    tensor: dict[str, Any] = {"name": "hidden", "datatype": "FP32", "shape": list(hidden.shape)}
    document = {"inputs": [tensor], "parameters": {"k": k, "experts": experts}}
    if kind == "v2":
        tensor["data"] = hidden.ravel().tolist()
        return json.dumps(document).encode(), path, {"Content-Type": "application/json"}
    tensor["parameters"] = {"binary_data_size": hidden.nbytes}
    document["parameters"]["binary_data_output"] = True
    head = json.dumps(document).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }
    return head + hidden.tobytes(), path, headers


def post(path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: chaos", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + END + body


def npy(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
