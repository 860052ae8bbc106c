"""A real server is told to stop: it drains, finishes what is under way, and exits."""

import signal
import socket
from pathlib import Path

import httpx
import orjson
import pytest
from helpers.server import running, wait_until
from helpers.tiny_bundle import rows_for


def assert_answers(client: httpx.Client) -> None:
    response = client.post("/topk", json={"inputs": rows_for(1).tolist(), "k": 1})
    assert response.status_code == 200
    assert response.json()["experts"] == [1]


def test_sigterm_fails_readiness_first_and_goes_on_answering(models: Path, tmp_path: Path) -> None:
    body = orjson.dumps({"inputs": rows_for(0).tolist(), "k": 1})
    head = f"POST /topk HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
    head += b"Content-Type: application/json\r\n\r\n"
    log = tmp_path / "log"
    with running(models, log, "--default-model", "tiny", "--drain-seconds", "60") as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(head + body[:10])
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("/readyz", 503)  # balancers are told first ...
            assert httpx.get(server.url + "/livez").status_code == 200
            with httpx.Client(base_url=server.url) as client:
                assert_answers(client)  # ... while requests are still answered
            assert server.process.poll() is None
            connection.sendall(body[10:])
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")
        assert server.process.poll() is None


def test_sigterm_finishes_what_is_under_way_and_exits_0(models: Path, tmp_path: Path) -> None:
    body = orjson.dumps({"inputs": rows_for(0).tolist(), "k": 1})
    head = f"POST /topk HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
    head += b"Content-Type: application/json\r\n\r\n"
    log = tmp_path / "log"
    with running(models, log, "--default-model", "tiny", "--drain-seconds", "0") as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(head + body[:10])
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "Shutting down" in log.read_text())
            connection.sendall(body[10:])
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")
        assert server.process.wait(30) == 0
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_idle_server_stops_with_0(models: Path, tmp_path: Path, sign: signal.Signals) -> None:
    with running(models, tmp_path / "log", env={"DSS_DRAIN_SECONDS": "0"}) as server:
        server.process.send_signal(sign)
        assert server.process.wait(30) == 0
