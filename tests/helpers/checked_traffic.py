"""Clients that never stop asking a server, and check every answer against the engine of the version
that it names."""

import http.client
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
from helpers.server import wait_until
from numpy.typing import NDArray

from service import bundle
from service.engine import Engine

K = 3
PATHS = ("/models/{name}/topk", "/models/{name}/versions/default/topk", "/v2/models/{name}/infer")


@dataclass
class Traffic:
    """What became of the requests so far; it may be read at any time."""

    answered: Counter[int] = field(default_factory=Counter)  # by version
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    expected: dict[int, list[list[int]]] = field(default_factory=dict)  # by version

    @property
    def total(self) -> int:
        return sum(self.answered.values())

    def knows(self, version: int, path: Path, hidden: NDArray[np.float32]) -> None:
        """What this version answers; to be said before a server can serve it."""
        self.expected[version] = Engine(bundle.read(path)).topk(hidden, K).classes.tolist()

    def flows(self, requests: int = 30) -> None:
        """Wait for so many more answers."""
        enough = self.total + requests
        wait_until(lambda: self.total >= enough or bool(self.failed or self.wrong), 30)
        self.is_clean()

    def serves(self, version: int) -> None:
        """Wait until a version answers."""
        seen = self.answered[version]
        wait_until(lambda: self.answered[version] > seen or bool(self.failed or self.wrong), 30)
        self.is_clean()

    def is_clean(self) -> None:
        assert not self.failed, self.failed[:3]
        assert not self.wrong, self.wrong[:3]


@contextmanager
def traffic(
    port: int,
    name: str,
    hidden: NDArray[np.float32],
    bundles: Mapping[int, Path],
    paths: tuple[str, ...] = PATHS,
) -> Iterator[Traffic]:
    """One client for each path, from now until the end."""
    flow = Traffic()
    for version, path in bundles.items():
        flow.knows(version, path, hidden)
    ended = threading.Event()
    clients = [
        threading.Thread(target=_ask, args=(port, path.format(name=name), hidden, flow, ended))
        for path in paths
    ]
    for client in clients:
        client.start()
    try:
        yield flow
    finally:
        ended.set()
        for client in clients:
            client.join()
    flow.is_clean()


def _ask(
    port: int, path: str, hidden: NDArray[np.float32], flow: Traffic, ended: threading.Event
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = _body(path, hidden)
    try:
        while not ended.is_set():
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                flow.failed.append(f"{path}: {answer.status} {content[:200]!r}")
                continue
            version, classes = _read(path, content)
            if classes != flow.expected.get(version):
                flow.wrong.append(f"{path}: version {version} answered {classes}")
            flow.answered[version] += 1
    except Exception as error:
        flow.failed.append(f"{path}: {error!r}")
    finally:
        connection.close()


def _body(path: str, hidden: NDArray[np.float32]) -> bytes:
    if not path.startswith("/v2/"):
        return orjson.dumps({"inputs": hidden.tolist(), "k": K})
    tensor = {
        "name": "hidden",
        "datatype": "FP32",
        "shape": list(hidden.shape),
        "data": hidden.ravel().tolist(),
    }
    return orjson.dumps({"inputs": [tensor], "parameters": {"k": K}})


def _read(path: str, content: bytes) -> tuple[int, list[list[int]]]:
    answer = orjson.loads(content)
    if not path.startswith("/v2/"):
        return answer["version"], answer["classes"]
    outputs = {output["name"]: output for output in answer["outputs"]}
    classes = np.reshape(outputs["classes"]["data"], outputs["classes"]["shape"])
    return int(answer["model_version"]), classes.tolist()
