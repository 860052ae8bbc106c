"""Varied traffic for a picture of the dashboard: rows for chosen experts, and phases of load."""

import http.client
import io
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from service import bundle
from service.engine import Engine

NPY, JSON = "application/x-npy", "application/json"
CLIENTS = 24
CANDIDATES = 40_000
SUREST = 20  # rows kept for each expert
SIZE = 85.0  # the length of the demo's hidden vectors
NUMBER = 512  # of different requests


class Rows:
    """Hidden vectors for each expert of a bundle, such as training's were: the gate is sure."""

    def __init__(self, path: Path) -> None:
        read = bundle.read(path)
        self.n_experts = read.manifest.n_experts
        self._random = np.random.default_rng(0)
        weights = np.concatenate([read.expert_weight(k) for k in range(self.n_experts)])  # [N,D]
        self.width = weights.shape[1]
        # What scores a class highly points along its weights, and hidden vectors are not negative.
        drawn = weights[self._random.integers(len(weights), size=CANDIDATES)]
        hidden = np.maximum(drawn, 0)
        hidden *= SIZE / np.linalg.norm(hidden, axis=1, keepdims=True)
        answered = Engine(read).topk(hidden.astype(np.float32), 1)
        experts, gates = np.ravel(answered.experts), np.ravel(answered.gates)
        order = np.argsort(-gates)
        self._of = [hidden[order[experts[order] == k][:SUREST]] for k in range(self.n_experts)]

    def draw(
        self, experts: NDArray[np.int64], size: int, noise: float = 0.0
    ) -> NDArray[np.float32]:
        """Rows [size,D], for each expert as many as for any other, or one more."""
        turns = [self._random.permutation(experts) for _ in range(-(-size // len(experts)))]
        pools = [self._of[k] for k in np.concatenate(turns)[:size]]
        rows = np.stack([pool[self._random.integers(len(pool))] for pool in pools])
        drawn = rows + noise * self._random.normal(size=rows.shape)
        return np.maximum(drawn, 0).astype(np.float32)


@dataclass(frozen=True)
class Request:
    path: str
    kind: str  # of content
    body: bytes


@dataclass(frozen=True)
class Phase:
    name: str
    share: float  # of the whole time
    requests: Sequence[Request]
    per_second: float  # of all clients together, if the service keeps up
    begins: Callable[[], None] = field(default=lambda: None)


def requests(
    rows: Rows,
    experts: NDArray[np.int64],
    sizes: Sequence[int],
    noise: float = 0.0,
    number: int = NUMBER,
) -> list[Request]:
    made = []
    for turn in range(number):
        body = io.BytesIO()
        np.save(body, rows.draw(experts, sizes[turn % len(sizes)], noise))
        made.append(Request("/topk?k=10", NPY, body.getvalue()))
    return made


def bad_requests(rows: Rows) -> list[Request]:
    """Mistakes that clients make."""
    narrow = io.BytesIO()
    np.save(narrow, np.zeros((1, rows.width - 1), np.float32))
    return [
        Request("/topk?k=10", NPY, narrow.getvalue()),
        Request("/topk", JSON, b'{"inputs": '),
        Request("/topk?k=100000", NPY, requests(rows, np.arange(1), [1], number=1)[0].body),
        Request("/models/nothing/topk", JSON, b'{"inputs": [[0.0]], "k": 1}'),
    ]


class Clients:
    """Threads that ask at random moments, what the present phase says."""

    def __init__(self, port: int, first: Phase) -> None:
        self.phase = first
        self._port = port
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, seed: int) -> None:
        chance = random.Random(seed)  # noqa: S311
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        while not self._ended.is_set():
            phase = self.phase
            asked = chance.choice(phase.requests)
            try:
                connection.request("POST", asked.path, asked.body, {"Content-Type": asked.kind})
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                connection.close()  # a refusal may end the connection; the next request opens one
            self._ended.wait(chance.expovariate(phase.per_second / CLIENTS))
        connection.close()


def driven(port: int, seconds: float, phases: Sequence[Phase]) -> None:
    clients = Clients(port, phases[0])
    try:
        for phase in phases:
            phase.begins()
            clients.phase = phase
            time.sleep(phase.share * seconds)
    finally:
        clients.end()
