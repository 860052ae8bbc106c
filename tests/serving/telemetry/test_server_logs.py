"""What a real server logs; nobody waits for a log that nobody reads."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.blocked_pipe import Pipe
from helpers.server import Running, free_port, running, wait_until
from helpers.tiny_bundle import WIDTH, rows_for

from service.telemetry import log_queue


@pytest.fixture(scope="module")
def watched(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that logs every request as JSON."""
    log = tmp_path_factory.mktemp("logs") / "log"
    env = {"DSS_ACCESS_LOG": "1", "DSS_LOG_FORMAT": "json", "DSS_LOG_LEVEL": "debug"}
    with running(models, log, "--default-model", "tiny", env=env) as started:
        yield started


def lines_of(server: Running, request_id: str) -> list[dict[str, Any]]:
    """Once there is an access line: everything that was logged for a request."""

    def found() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        return [line for line in lines if line.get("request_id") == request_id]

    wait_until(lambda: any(line["logger"] == "service.access" for line in found()), 10)
    return found()


def test_every_line_of_a_server_is_json(watched: Running) -> None:
    lines = [json.loads(line) for line in watched.log.read_text().splitlines()]
    assert {"uvicorn.error", "service.access"} <= {line["logger"] for line in lines}


@pytest.mark.parametrize("path", ["/topk", "/models/tiny/versions/1/topk"])
def test_an_answer_and_its_line_bear_the_clients_name(watched: Running, path: str) -> None:
    body = {"inputs": rows_for(0, 0, 1).tolist(), "k": 2}
    name = f"client{path.replace('/', '-')}"
    with httpx.Client(base_url=watched.url, headers={"X-Request-ID": name}) as client:
        for _ in range(2):  # known heads are answered another way
            answer = client.post(path, json=body)
            assert answer.headers["x-request-id"] == name
    wait_until(lambda: len(lines_of(watched, name)) == 2, 10)
    for line in lines_of(watched, name):
        assert (line["status"], line["model"], line["rows"], line["k"]) == (200, "tiny", 3, 2)
        assert line["version"] == int(answer.headers["dss-model-version"])
        assert line["experts"] == {"distinct": 2, "top": {"0": 0.6667, "1": 0.3333}}
        assert line["bytes_in"] == int(answer.request.headers["content-length"])
        assert line["bytes_out"] == len(answer.content)
        steps = line["timings"]
        assert set(steps) == {"decode", "queue", "gate", "experts", "compute", "encode"}
        apart = steps["decode"] + steps["queue"] + steps["compute"] + steps["encode"]
        assert apart == pytest.approx(line["seconds"], abs=1e-6)
        assert 0 < steps["gate"] + steps["experts"] <= steps["compute"] + 1e-6


def test_a_v2_request_is_logged_like_any(watched: Running) -> None:
    tensor = {"name": "hidden", "shape": [1, WIDTH], "datatype": "FP32"}
    body = {"inputs": [{**tensor, "data": rows_for(2).tolist()}], "parameters": {"k": 3}}
    answer = httpx.post(
        f"{watched.url}/v2/models/tiny/infer", json=body, headers={"x-request-id": "v2"}
    )
    assert answer.headers["x-request-id"] == "v2"
    [line] = lines_of(watched, "v2")
    assert (line["route"], line["model"], line["k"]) == ("/v2/models/{name}/infer", "tiny", 3)
    assert line["experts"] == {"distinct": 1, "top": {"2": 1.0}}


@pytest.mark.parametrize(
    ("method", "path", "status", "route", "reason"),
    [
        ("GET", "/models", 200, "/models", None),
        ("GET", "/models/none", 404, "/models/{name}", "model_not_found"),
        ("GET", "/nothing/here", 404, "unmatched", None),
        ("POST", "/models/none/topk", 404, "/models/{name}/topk", "model_not_found"),
        ("POST", "/topk", 422, "/topk", "wrong_width"),
    ],
)
def test_every_route_names_and_logs_its_requests(
    watched: Running, method: str, path: str, status: int, route: str, reason: str | None
) -> None:
    body = {"inputs": [[1.0]]} if method == "POST" else None
    answer = httpx.request(method, watched.url + path, json=body)
    assert answer.status_code == status
    name = answer.headers["x-request-id"]
    line = lines_of(watched, name)[-1]
    assert (line["method"], line["route"], line["status"]) == (method, route, status)
    assert line.get("reason") == reason
    assert line["bytes_out"] == len(answer.content)


def test_a_name_cannot_forge_a_line(watched: Running) -> None:
    """Neither as a header, nor in a path, which may hold any character once it is unquoted."""
    answer = httpx.get(f"{watched.url}/models/a%0A%1B%5B31m", headers={"x-request-id": "a b"})
    name = answer.headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", name)
    assert lines_of(watched, name)[-1]["path"] == "/models/a\n\x1b[31m"


def test_probes_are_not_left_out(watched: Running) -> None:
    name = httpx.get(f"{watched.url}/livez").headers["x-request-id"]
    assert lines_of(watched, name)[-1]["route"] == "/livez"


def test_a_server_whose_log_nobody_reads_still_answers_and_ends(models: Path) -> None:
    port = free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith("DSS_")}
    env |= {"DSS_ACCESS_LOG": "1", "DSS_LOG_FORMAT": "json", "DSS_DRAIN_SECONDS": "0"}
    pipe = Pipe()
    command = [sys.executable, "-m", "service.cli", "serve", "--models", str(models)]
    with subprocess.Popen([*command, "--port", str(port)], stderr=pipe.into, env=env) as process:
        try:
            server = Running(f"http://127.0.0.1:{port}", port, process, Path(os.devnull))
            server.wait_for("/readyz")
            ask_often(port, log_queue.ROOM + 200)
            assert pipe.is_full()
            answer = httpx.get(f"{server.url}/metrics")
            dropped = re.search(r"^dss_log_lines_dropped_total (\S+)$", answer.text, re.MULTILINE)
            assert dropped is not None and float(dropped[1]) > 100
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            assert time.monotonic() - begun < 15
        finally:
            process.kill()
            pipe.close()


def ask_often(port: int, count: int) -> None:
    """As many requests as quickly as one connection allows."""
    request = b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(30)
        answered = sent = 0
        while answered < count:
            if sent - answered < 50:
                connection.sendall(request * 50)
                sent += 50
            text = connection.recv(1 << 20)
            assert text, "The server closed the connection."
            answered += text.count(b"HTTP/1.1 404")


def test_workers_say_which_one_they_are(models: Path, tmp_path: Path) -> None:
    env = {"DSS_LOG_FORMAT": "json", "DSS_ACCESS_LOG": "1"}
    with running(models, tmp_path / "log", "--workers", "2", env=env) as server:
        name = httpx.get(f"{server.url}/models").headers["x-request-id"]
        assert lines_of(server, name)[-1]["worker"] in (0, 1)
        everything = [json.loads(line) for line in server.log.read_text().splitlines()]
        assert {0, 1, None} == {line.get("worker") for line in everything}  # None: the supervisor
