"""A server that stops loses no request of clients that keep their connections."""

import http.client
import select
import signal
import threading
from collections import Counter
from pathlib import Path
from time import sleep

import orjson
import pytest
from helpers.server import running, wait_until
from helpers.tiny_bundle import rows_for

BODY = orjson.dumps({"inputs": rows_for(0).tolist(), "k": 1})
JSON = {"Content-Type": "application/json"}
# What clients ask, and how long they think between two requests.
ASKS = [("POST", "/topk", BODY), ("GET", "/models", None), ("GET", "/readyz", None)]
PAUSES = (0.0, 0.003, 0.05)


class Client:
    """As those of usual libraries: it keeps its connection until it is told that it ends."""

    def __init__(self, port: int, method: str, path: str, body: bytes | None, pause: float) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._asks = method, path, body, JSON
        self._pause = pause
        self.answered = 0
        self.told = 0  # that the connection ends
        self.lost: list[str] = []
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self.lost:
            kept = self._connection.sock
            if kept is not None and select.select([kept], [], [], 0)[0]:
                self._connection.close()  # the server has ended it while nothing was asked
            try:
                if self._connection.sock is None:
                    self._connection.connect()
            except OSError:
                return  # the server is gone, and nothing was asked
            try:
                self._connection.request(*self._asks)
                answer = self._connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException) as error:
                self.lost.append(repr(error))
                return
            self.answered += 1
            self.told += answer.getheader("connection") == "close"
            sleep(self._pause)


@pytest.mark.parametrize("drain", ["0", "1"])
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("head_cache", ["true", "false"])
def test_no_request_is_lost(
    models: Path, tmp_path: Path, workers: str, drain: str, head_cache: str
) -> None:
    arguments = ("--default-model", "tiny", "--workers", workers, "--drain-seconds", drain)
    env = {"DSS_HEAD_CACHE": head_cache}
    with running(models, tmp_path / "log", *arguments, env=env) as server:
        clients = [Client(server.port, *ask, pause) for ask in ASKS for pause in PAUSES]
        for client in clients:
            client.thread.start()
        wait_until(lambda: all(client.answered > 20 or client.lost for client in clients))
        server.process.send_signal(signal.SIGTERM)
        for client in clients:
            client.thread.join()
        assert Counter(why for client in clients for why in client.lost) == {}
        assert any(client.told for client in clients)
        assert server.process.wait(60) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
