"""The parts of the HTTP comparison that need no server."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.document import MarkersMissing
from benchmarks.http import tables as http_tables
from benchmarks.http.body_formats import WIRES
from benchmarks.http.precision import with_precision
from benchmarks.http.ratios import WANTED, Ratio, medians, ratios
from benchmarks.http.servers import PEERS, SERVERS
from benchmarks.http.wrk import LoadFailed, parse, write_script

WRK_OUTPUT = """\
Running 1s test @ http://127.0.0.1:8000
  1 threads and 16 connections
  Latency Distribution
     50%    1.90ms
Requests/sec:   7202.11
measured requests=7300 seconds=1.013592 p50_us=1950 p90_us=3001 p99_us=5971 refused=3 connect=0\
 read=0 write=0 timeout=1
"""


def point(line: str, batch: int = 1, concurrency: int = 16, **changed: Any) -> dict[str, Any]:
    made = {
        "round": 1,
        "line": line,
        "batch": batch,
        "concurrency": concurrency,
        "requests": 3000,
        "requests_per_second": 1000.0,
        "p50_us": 100.0,
        "p90_us": 200.0,
        "p99_us": 300.0,
        "errors": {},
        "server_cpu_seconds": 3.0,
        "requests_per_cpu_second": 1000.0,
        "wrk_cpu_seconds": 1.2,
        "seconds": 3.0,
        "rss_bytes": 200 * 2**20,
        "pss_bytes": 100 * 2**20,
        "processes": 1,
    }
    return made | changed


def by_name(
    points: list[dict[str, Any]], memory: dict[str, float] | None = None
) -> dict[str, Ratio]:
    return {ratio.name: ratio for ratio in ratios(medians(points), 2, memory)}


# --- load ------------------------------------------------------------------------------------


def test_wrk_is_read_exactly_and_its_errors_are_kept() -> None:
    found = parse(WRK_OUTPUT)
    assert (found.requests, found.p50_us, found.p90_us, found.p99_us) == (7300, 1950, 3001, 5971)
    assert found.requests_per_second == pytest.approx(7300 / 1.013592)
    assert found.errors == {"refused": 3, "timeout": 1}


def test_wrk_without_a_measurement_is_a_failure() -> None:
    with pytest.raises(LoadFailed, match="Connection refused"):
        parse("unable to connect to 127.0.0.1:8000 Connection refused")


def test_the_script_sends_every_body(tmp_path: Path) -> None:
    rows = [np.full((2, 3), number, np.float32) for number in range(4)]
    script = write_script(tmp_path / "load", 8123, WIRES["npy"], rows)
    text = script.read_text()
    assert '["Host"] = "127.0.0.1:8123"' in text
    assert '["Accept"] = "application/x-npy"' in text
    assert "for number = 1, 4 do" in text
    np.testing.assert_array_equal(np.load(tmp_path / "load" / "4"), rows[3])


# --- wires -----------------------------------------------------------------------------------


def test_the_v2_header_ends_where_the_floats_begin() -> None:
    hidden = np.arange(6, dtype=np.float32).reshape(2, 3)
    wire = WIRES["v2 binary"]
    body, headers = wire.encode(hidden), wire.headers(hidden)
    start = int(headers["Inference-Header-Content-Length"])
    assert json.loads(body[:start])["inputs"][0]["shape"] == [2, 3]
    np.testing.assert_array_equal(np.frombuffer(body[start:], np.float32), hidden.ravel())


def test_a_v2_answer_is_read_by_its_header() -> None:
    classes = np.arange(20).reshape(2, 10)
    outputs = [
        {"name": "scores", "shape": [2, 10], "parameters": {"binary_data_size": 80}},
        {"name": "classes", "shape": [2, 10], "parameters": {"binary_data_size": 160}},
    ]
    head = json.dumps({"outputs": outputs}).encode()
    body = head + np.zeros(20, np.float32).tobytes() + classes.tobytes()
    headers = {"inference-header-content-length": str(len(head))}
    np.testing.assert_array_equal(WIRES["v2 binary"].decode(body, headers), classes)


def test_bare_bytes_are_classes_and_then_scores() -> None:
    classes = np.arange(20).reshape(2, 10)
    body = classes.tobytes() + np.ones(20, np.float32).tobytes()
    np.testing.assert_array_equal(WIRES["raw"].decode(body, {}), classes)


# --- ratios ----------------------------------------------------------------------------------


def test_medians_are_over_rounds_without_errors() -> None:
    rates = [900.0, 1000.0, 5000.0]
    points = [point("floor", requests_per_second=rate) for rate in rates]
    points.append(point("floor", requests_per_second=1.0, errors={"refused": 7}))
    assert medians(points)[("floor", 1, 16)]["requests_per_second"] == 1000.0


def test_a_point_with_errors_in_every_round_is_missing() -> None:
    assert medians([point("floor", errors={"timeout": 1})]) == {}


def test_a_ratio_is_held_to_its_bound() -> None:
    name = "p50, ours / floor, batch 1, c 1"
    floor = point("floor", concurrency=1)
    near = by_name([point("ours", concurrency=1, p50_us=134.0), floor])[name]
    far = by_name([point("ours", concurrency=1, p50_us=136.0), floor])[name]
    assert near.value == pytest.approx(1.34)
    assert near.reached is True
    assert far.reached is False


def test_the_best_of_several_is_what_ours_is_held_to() -> None:
    name = "sparse ours, 1 or 2 workers / best full softmax that batches, batch 1, c 16"
    points = [
        point("ours", requests_per_second=6000.0),
        point("ours, 2 workers", requests_per_second=9000.0),
        point("mosec, full", requests_per_second=2000.0),
        point("Triton, full", requests_per_second=3000.0),
        point("floor, full", requests_per_second=99_000.0),  # does not batch
    ]
    found = by_name(points)[name]
    assert found.value == pytest.approx(3.0)
    assert found.against == "Triton, full, batch 1, c 16"


def test_of_several_places_the_worst_decides_and_none_may_be_missing() -> None:
    name = "2 workers / 1 worker, c 16, the lowest"
    first = [point("ours, 2 workers", requests_per_second=1800.0), point("ours")]
    second = [point("ours, 2 workers", 32, requests_per_second=1600.0), point("ours", 32)]
    assert by_name(first + second)[name].value == pytest.approx(1.6)
    assert by_name(first)[name].value is None


def test_the_cores_that_wrk_took_are_given_back() -> None:
    name = "2 workers / 1 worker, c 16, the lowest, wrk's own time given back"
    points = [
        made
        for batch in (1, 32)
        for made in (
            point("ours", batch),
            point("ours, 2 workers", batch, requests_per_second=1500.0, wrk_cpu_seconds=1.5),
        )
    ]
    found = by_name(points)
    assert found["2 workers / 1 worker, c 16, the lowest"].value == pytest.approx(1.5)
    assert found[name].value == pytest.approx(1.5 * 2 / 1.5)  # wrk had half a core of two


def test_memory_is_held_to_its_bound() -> None:
    name = "resident memory above a worker without models / bundle"
    found = by_name([], {"above_no_model_per_bundle_byte": 1.4})[name]
    assert found.reached is False


# --- tables ----------------------------------------------------------------------------------


def results() -> dict[str, Any]:
    points = [
        point("ours", requests_per_second=12_345.0),
        point("floor"),
        point("floor", 32, errors={"timeout": 2}),
    ]
    found = medians(points)
    return {
        "command": "python -m benchmarks.http",
        "machine": {"cores": 2, "cpu": "Some CPU"},
        "model": {
            "bundle": "random",
            "n_classes": 33_278,
            "hidden_size": 200,
            "n_experts": 64,
            "classes_scored_per_row": 650.0,
            "k": 10,
        },
        "plan": {"rounds": 3, "seconds": 3},
        "lines": {
            "ours": {"model": "sparse", "wire": "npy"},
            "floor": {"model": "sparse", "wire": "raw"},
            "mosec": {"model": "sparse", "wire": "raw"},
        },
        "failures": {"mosec": "It ended while starting: no luck"},
        "ratios": [ratio.as_json() for ratio in ratios(found, 2, None)],
        "medians": [
            {"line": line, "batch": batch, "concurrency": concurrency} | numbers
            for (line, batch, concurrency), numbers in found.items()
        ],
        "points": points,
    }


def test_tables_say_what_was_measured_and_what_was_not() -> None:
    text = http_tables.render(json.loads(json.dumps(results())))
    assert "| ours | sparse | npy | 12,345 |" in text
    assert "- mosec: It ended while starting: no luck" in text
    assert "- floor, batch 32, concurrency 16: errors in round 1 (2 timeout)" in text
    assert re.search(r"\| requests/s, ours / floor, batch 1, c 16 \| 12\.3[45] \|.* yes \|", text)
    assert "| not measured | at most 1.35 |" in text


def test_models_of_different_precision_say_so(tmp_path: Path) -> None:
    engines = tmp_path / "engines.json"
    point = {"bundle": "ds", "dial": {"experts": 1}, "precision": {"1": 0.87}}
    engines.write_text(json.dumps({"Corpus": {"contestants": [{"dial": {}}, point]}}))
    found = results()
    assert with_precision(found, engines) == found  # a bundle that was not measured there
    found["command"] += " --bundle runs/ds/1"
    found["lines"]["floor, full"] = {"model": "full", "wire": "raw"}
    found["ratios"][0]["against"] = "floor, full, batch 1, c 1"
    text = http_tables.render(with_precision(found, engines))
    assert "| ours | sparse, 0.870 | npy | 12,345 |" in text
    assert "| floor, full, batch 1, c 1; precision 1.000 / 0.870 |" in text
    assert "| floor, batch 1, c 16 |" in text


def test_every_row_of_a_table_has_all_its_cells() -> None:
    blocks = http_tables.render(results()).split("\n\n")
    tables = [block for block in blocks if block.startswith("|")]
    assert len(tables) == 4
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_tables_replace_only_what_is_between_the_marks(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text("before\n<!-- http:begin -->\nold\n<!-- http:end -->\nafter\n")
    http_tables.update(document, results())
    once = document.read_text()
    http_tables.update(document, results())
    assert document.read_text() == once
    assert once.startswith("before\n<!-- http:begin -->\n")
    assert once.endswith("\n<!-- http:end -->\nafter\n")
    assert "old" not in once
    assert "12,345" in once


def test_a_document_without_marks_is_left_alone(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text("<!-- http:end --> then <!-- http:begin -->")
    with pytest.raises(MarkersMissing):
        http_tables.update(document, results())


# --- servers ---------------------------------------------------------------------------------


def test_lines_have_names_of_their_own_and_known_wires() -> None:
    lines = [server.line(wire) for server in SERVERS for wire in server.wires]
    assert len(lines) == len(set(lines))
    assert {wire for server in SERVERS for wire in server.wires} <= WIRES.keys()


def test_every_ratio_names_lines_that_exist() -> None:
    lines = {server.line(wire) for server in SERVERS for wire in server.wires}
    for wanted in WANTED:
        assert {*wanted.ours, *wanted.theirs} <= lines, wanted.name


def test_every_peer_pins_what_it_installs() -> None:
    for peer in {server.peer for server in SERVERS if server.peer}:
        for file in (PEERS / peer).glob("requirements*.txt"):
            wanted = [line for line in file.read_text().splitlines() if not line.startswith("#")]
            assert wanted, file
            assert all("==" in line or line == "-r ../engine.txt" for line in wanted), file
