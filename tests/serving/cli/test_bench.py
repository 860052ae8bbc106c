"""`dss bench`: the parts of the load generator, and whole runs against real servers."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.paths import DEMO
from helpers.server import Running, free_port
from helpers.tiny_bundle import WIDTH

from service.bench import http, load, proc_stats, rows
from service.bench.http_reader import AnswerNotUnderstood, AnswerReader, is_ok, problem
from service.bundle import Bundle
from service.cli.main import cli
from service.errors import EmptyBatch, NotFinite, WrongWidth

SHORT = ("--seconds", "0.6", "--attempts", "1")  # windows of 0.2 s


def dss(*arguments: object) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DSS_")}
    return subprocess.run(
        [sys.executable, "-m", "service.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean,
    )


def assert_refused(arguments: Sequence[object], *words: str) -> None:
    """Status 1 and, last of all, one sentence with these words."""
    result = CliRunner().invoke(cli, ["bench", *map(str, arguments)])
    assert result.exit_code == 1, result.output
    assert re.search(r"(^|\n)Error: [^\n]*\.\n$", result.output), result.output
    for word in words:
        assert word in result.output


# --- answers ---------------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nContent-Length: 7\r\n\r\nat once"
REFUSED = (
    b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 27\r\nretry-after: 1\r\n\r\n"
    b'{"detail":"Try again soon"}'
)


@pytest.mark.parametrize("cut", range(1, len(OK)))
def test_an_answer_may_be_cut_anywhere(cut: int) -> None:
    reader = AnswerReader()
    assert reader.feed(OK[:cut]) is None
    assert reader.feed(OK[cut:]) == OK
    assert reader.feed(REFUSED) == REFUSED  # the connection goes on


def test_an_answer_may_come_byte_by_byte() -> None:
    reader = AnswerReader()
    seen = [reader.feed(OK[place : place + 1]) for place in range(len(OK))]
    assert seen == [None] * (len(OK) - 1) + [OK]


@pytest.mark.parametrize(
    "received",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7\r\nat once\r\n0\r\n\r\n",
        b"SSH-2.0\r\ncontent-length: 0\r\n\r\n",
        OK + b"more",
    ],
    ids=["chunked", "not HTTP", "too long"],
)
def test_other_answers_are_not_misread(received: bytes) -> None:
    with pytest.raises(AnswerNotUnderstood):
        AnswerReader().feed(received)


def test_a_problem_is_said_in_its_own_words() -> None:
    assert is_ok(OK)
    assert not is_ok(REFUSED)
    assert problem(REFUSED) == "status 429: Try again soon"
    assert problem(b"HTTP/1.1 502 Bad\r\ncontent-length: 3\r\n\r\n<p>") == "status 502"


# --- load ------------------------------------------------------------------------------------


@contextmanager
def scripted(*answers: bytes | None) -> Iterator[int]:
    """A server that gives these answers in turn on every connection; None closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            while True:
                for answer in answers:
                    if not connection.recv(2**16) or answer is None:
                        return
                    connection.sendall(answer)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def generate(port: int, connections: int = 2) -> load.Load:
    now = monotonic()
    requests = [b"POST / HTTP/1.1\r\n\r\n"]
    return load.generate(load.Plan("127.0.0.1", port, connections, requests, now, now + 0.2))


def test_every_answer_is_timed() -> None:
    with scripted(OK) as port:
        seen = generate(port)
    assert seen.errors == 0
    assert len(seen.finished) == len(seen.seconds) > 10
    assert all(seconds > 0 for seconds in seen.seconds)
    assert seen.cpu_seconds > 0


def test_other_statuses_are_errors_and_not_timed() -> None:
    with scripted(OK, REFUSED) as port:
        seen = generate(port, connections=1)
    assert seen.first_error == "status 429: Try again soon"
    assert abs(seen.errors - len(seen.finished)) <= 1


def test_a_connection_that_ends_is_an_error_and_opened_again() -> None:
    with scripted(OK, OK, None) as port:
        seen = generate(port)
    assert seen.first_error == "the server closed the connection"
    assert seen.errors > 2  # more than there are connections
    assert len(seen.finished) > seen.errors


def test_a_generator_is_small() -> None:
    code = "import sys, service.bench.load; print({'numpy', 'click'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


def test_where_nothing_listens_is_said() -> None:
    with pytest.raises(load.NotReachable, match="No server answers at"):
        generate(free_port())


# --- figures ---------------------------------------------------------------------------------


def test_windows_hold_what_finished_in_them() -> None:
    one, other = load.Load(), load.Load()
    for finished, seconds in ((9.9, 1), (10.1, 2), (11.5, 3), (12.9, 4), (13.1, 5)):
        one.finished.append(finished)
        one.seconds.append(seconds)
    other.finished.append(11.1)
    other.seconds.append(6)
    windows = http._in_windows([one, other], starts=10.0, window=1.0)
    assert [window.tolist() for window in windows] == [[2], [3, 6], [4]]


def test_windows_agree_within_a_tenth() -> None:
    assert http._agree([np.full(n, 1e-3) for n in (100, 109, 91)])
    assert not http._agree([np.full(n, 1e-3) for n in (100, 100, 70)])
    assert not http._agree([np.full(100, seconds) for seconds in (1e-3, 1e-3, 1.4e-3)])


def test_connections_are_shared_out() -> None:
    assert http._shares(7, 3) == [3, 2, 2]
    turned = http._turned([b"a", b"b", b"c", b"d"], 2)
    assert turned == [[b"a", b"b", b"c", b"d"], [b"c", b"d", b"a", b"b"]]


def test_a_busy_generator_is_told() -> None:
    assert "--generators 2" in http._notes(0.5, [0.95])[0]
    assert http._notes(None, [0.5]) == []


def test_the_servers_own_figures_are_left_out_if_others_ask_too() -> None:
    answered = load.Load()
    answered.finished.extend([1.0, 2.0])
    after = {
        "dss_requests_total": 2.0, "dss_rows_total": 6.0, "dss_executions_total": 1.0,
        "dss_queue_seconds_sum": 0.002, "dss_queue_seconds_count": 2.0,
    }  # fmt: skip
    alone = http._server_side({}, after, [answered])
    assert alone == {"joined_rows": 6.0, "queue_us": pytest.approx(1000), "compute_us": None}
    others = http._server_side({}, after | {"dss_requests_total": 3.0}, [answered])
    assert set(others.values()) == {None}


def test_processes_are_found_by_their_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert os.getpid() in proc_stats.serving(listener.getsockname()[1])
    assert proc_stats.serving(free_port()) == []
    resident, cpu = proc_stats.resident_bytes([os.getpid()]), proc_stats.cpu_seconds([os.getpid()])
    assert resident is not None
    assert resident > 1e6
    assert cpu is not None
    assert cpu > 0
    assert proc_stats.resident_bytes([]) is None


def test_rows_come_from_a_file_or_samples_or_noise(tmp_path: Path) -> None:
    given = np.arange(12, dtype=np.float16).reshape(4, 3)
    np.save(tmp_path / "rows.npy", given)
    chosen = rows.choose(tmp_path / "rows.npy", None, 3)
    batches = chosen.batches(2, 5)
    assert [batch.shape for batch in batches] == [(2, 3)] * 5
    assert {tuple(row) for batch in batches for row in batch} <= {tuple(row) for row in given}
    assert len({batch.tobytes() for batch in batches}) > 1
    assert rows.choose(None, np.ones((2, 3), np.float32), 3).source == "2 samples of the bundle"
    assert "noise" in rows.choose(None, None, 3).source


def test_rows_that_cannot_be_asked_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.npy"
    for array, error in (
        (np.ones((2, 4), np.float32), WrongWidth),
        (np.ones(3, np.float32), WrongWidth),
        (np.ones((0, 3), np.float32), EmptyBatch),
        (np.ones((2, 3), np.int64), rows.RowsUnreadable),
    ):
        np.save(file, array)
        with pytest.raises(error):
            rows.choose(file, None, 3)
    file.write_bytes(b"")
    with pytest.raises(rows.RowsUnreadable):
        rows.choose(file, None, 3)
    np.save(file, np.full((2, 3), np.nan, np.float32))
    with pytest.raises(NotFinite):
        rows.choose(file, None, 3).batches(1)


# --- dss bench engine ------------------------------------------------------------------------


def test_the_engine_is_swept(tmp_path: Path) -> None:
    result = dss(
        "bench", "engine", DEMO, "--batch", "1,8", "--experts", "1,2", "--seconds", 0.05,
        "--out", tmp_path / "engine.json", "--plot", tmp_path / "engine.svg",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "8 samples of the bundle" in result.stdout
    assert len(result.stdout.splitlines()) == 2 + 1 + 4
    assert (tmp_path / "engine.svg").read_text().startswith("<?xml")
    report = json.loads((tmp_path / "engine.json").read_text())
    assert report["command"].startswith("dss bench engine ")
    assert {"cpu", "cores", "python", "numpy"} <= set(report["machine"])
    assert [(point["experts"], point["batch"]) for point in report["points"]] == [
        (1, 1), (1, 8), (2, 1), (2, 8),
    ]  # fmt: skip
    for point in report["points"]:
        assert 0 < point["p50_us"] <= point["p90_us"] <= point["p99_us"]
        assert point["us_per_row"] == pytest.approx(point["p50_us"] / point["batch"])
        assert point["rows_per_second"] > 0
        assert 0 < point["cpu_per_second"] < 2
        shares = point["gate_share"], point["expert_share"], point["rest_share"]
        assert all(0 <= share <= 1 for share in shares)
        assert sum(shares) == pytest.approx(1)
        assert point["resident_bytes"] > 0
        assert 0 < point["load_seconds"] < 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--batch", "1,none"), ("--batch", "1,none")),
        (("--batch", "0"), ("--batch",)),
        (("--backend", "gpu"), ("--backend", "onnx")),
        (("--k", "100000"), ("k is 100000",)),
        (("--plot", "picture.bmp"), ("--plot", ".svg")),
        (("--out", "no/such/folder.json"), ("no/such",)),
    ],
)
def test_what_the_engine_cannot_be_asked_is_refused(
    tiny: Bundle, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_refused(("engine", tiny.path, *arguments), *words)


def test_a_plot_needs_matplotlib_and_says_so(tiny: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert_refused(("engine", tiny.path, "--plot", "x.svg"), "matplotlib", "install")


# --- dss bench http --------------------------------------------------------------------------


def assert_sane(point: dict[str, Any]) -> None:
    assert point["errors"] == 0
    assert point["requests_per_second"] > 0
    assert point["rows_per_second"] == pytest.approx(point["batch"] * point["requests_per_second"])
    assert 0 < point["p50_us"] <= point["p90_us"] <= point["p99_us"]
    assert point["joined_rows"] >= point["batch"]
    assert point["queue_us"] >= 0
    assert point["compute_us"] > 0
    assert point["server_cpu_per_second"] > 0
    assert point["server_resident_bytes"] > 1e6
    assert point["generator_cpu_per_second"] > 0


def test_a_bundle_is_served_and_loaded(tmp_path: Path) -> None:
    result = dss(
        "bench", "http", DEMO, *SHORT, "--batch", "1,8", "--concurrency", "4", "--generators", "2",
        "--out", tmp_path / "http.json", "--plot", tmp_path / "http.svg",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "8 samples of the bundle" in result.stdout
    assert (tmp_path / "http.svg").read_text().startswith("<?xml")
    report = json.loads((tmp_path / "http.json").read_text())
    assert (report["model"], report["format"]) == ("demo", "npy")
    assert [point["batch"] for point in report["points"]] == [1, 8]
    for point in report["points"]:
        assert point["concurrency"] == 4
        assert_sane(point)
    port = re.search(r":([0-9]+),", result.stdout)
    assert port is not None
    assert proc_stats.serving(int(port[1])) == []  # the server was stopped


def test_a_running_server_is_loaded(server: Running, tmp_path: Path) -> None:
    result = dss(
        "bench", "http", server.url, *SHORT, "--model", "plain", "--format", "json", "--k", "3",
        "--batch", "2", "--concurrency", "2", "--out", tmp_path / "http.json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "noise" in result.stdout
    report = json.loads((tmp_path / "http.json").read_text())
    assert report["model"] == "plain"
    (point,) = report["points"]
    assert_sane(point)


def test_what_a_server_cannot_be_asked_is_refused(server: Running, tmp_path: Path) -> None:
    wide = tmp_path / "wide.npy"
    np.save(wide, np.ones((2, WIDTH + 1), np.float32))
    refused = {
        (server.url, "--model", "none"): ("no model 'none'", "tiny"),
        (server.url, "--hidden", wide): (f"[rows, {WIDTH}]",),
        (server.url, "--k", 1000, *SHORT, "--batch", 1): ("status 422", "k is 1000"),
        (server.url, "--workers", 2): ("--workers",),
        (server.url, "--generators", 2): ("generators",),
        (f"http://127.0.0.1:{free_port()}",): ("No server answers",),
        ("https://127.0.0.1",): ("http://host:port",),
        (tmp_path,): ("neither a bundle nor",),
        (server.url, "--concurrency", "1;2"): ("--concurrency",),
    }
    for arguments, words in refused.items():
        assert_refused(("http", *arguments), *words)
