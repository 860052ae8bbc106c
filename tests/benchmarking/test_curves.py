"""Queries a second against recall: what is counted, the table, and one tiny run from end to end."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.engines.contestants import FULL, OURS, PEER, Contestant
from benchmarks.engines.curves import __main__ as curves
from benchmarks.engines.curves import dials, first_pass, queries, report
from benchmarks.engines.curves.first_pass import Tried, shortlist, unbeaten
from benchmarks.engines.curves.our_dials import our_dials
from benchmarks.engines.random_bundles import Shape, random_rows, write_random
from service import bundle
from trainer.capture.folder import read_capture
from trainer.capture.pieces import Piece, Source, write_pieces
from trainer.data.arrays import Head
from trainer.evaluation.full_scan import full_topk

GOLDEN = Path(__file__).parents[1] / "serving/bundle/golden"
TINY = Shape(n_classes=200, n_experts=4, held=120, hidden_size=16)


def point(name: str, kind: str, microseconds: float, recall: float, k: int = 10) -> dict[str, Any]:
    times = {"mean_us": microseconds, "p50_us": microseconds}
    return {"name": name, "method": name, "kind": kind, "k": k, "recall": recall, **times}


def a_run() -> dict[str, Any]:
    return {
        "command": "python -m benchmarks.engines.curves",
        "machine": {"cpu": "Processor", "cores": 2, "python": "3"},
        "n_classes": 200,
        "hidden_size": 16,
        "rows": 40,
        "rounds": 2,
        "tried": {"peer": 30},
        "absent": [{"method": "ScaNN", "reason": "Install scann for this."}],
        "points": [
            point("one expert", OURS, 5.0, 0.96),
            point("two experts", OURS, 10.0, 0.995),
            point("coarse", PEER, 3.0, 0.8),
            point("middling", PEER, 20.0, 0.95),
            point("fine", PEER, 50.0, 0.992),
            point("scan", FULL, 100.0, 1.0),
        ],
    }


def test_the_fastest_of_those_with_enough_recall_are_compared() -> None:
    found = {each["recall"]: each for each in report.ratios(a_run())}
    assert [found[level]["ratio"] for level in (0.9, 0.95, 0.99)] == [4.0, 4.0, 5.0]
    assert found[0.99]["peer"]["name"] == "fine" and found[0.99]["ours"]["name"] == "two experts"
    assert found[0.999]["ratio"] is None and found[0.999]["peer"]["name"] == "scan"


def test_the_table_says_who_and_how_exactly() -> None:
    text = report.markdown({"Tiny": a_run()}, {"Tiny": "tiny.svg"})
    assert (
        "| 10 | 0.9 | 4.00 | one expert: 5.0 (5.0), 0.9600 | middling: 20.0 (20.0), 0.9500 |"
        in (text.splitlines())
    )
    assert "| 10 | 0.999 | - | none | scan: 100 (100), 1.0000 |" in text.splitlines()
    assert "Absent: ScaNN (Install scann for this.)" in text
    assert "Of 30 settings of others a first pass left 4." in text
    assert "| us, top 10 | recall >= 0.9 | recall >= 0.95 |" in text
    assert "| middling | 20.0 | 20.0 | - | - |" in text.splitlines()


def test_a_line_only_rises() -> None:
    points = [point("a", PEER, 1, 0.5), point("b", PEER, 2, 0.4), point("c", PEER, 3, 0.9)]
    assert [each["name"] for each in report.front(points[::-1])] == ["a", "c"]


def test_answers_are_counted_in_any_order_and_once() -> None:
    best = np.array([[0, 1, 2], [3, 4, 5]])
    answers = np.array([[2, 9, 0], [4, 4, -1]])
    assert queries.shared(answers, best) == 3


@pytest.mark.parametrize("width", [15, 16])
def test_a_bias_becomes_a_column(width: int) -> None:
    bias = random_rows(1, 50, 3)[0]
    head = Head(random_rows(50, width, 1), bias)
    hidden = random_rows(20, width, 2)
    wide, rows = queries.widened(head, hidden)
    assert wide.bias is None and wide.weight.shape[1] == rows.shape[1] == (
        16 if width == 15 else 18
    )
    np.testing.assert_allclose(rows @ wide.weight.T, hidden @ head.weight.T + bias, atol=1e-5)
    plain, same = queries.widened(Head(head.weight, None), hidden)
    assert plain.weight.shape[1] == same.shape[1] == 16


def test_dials_fit_the_head_and_the_answers() -> None:
    assert dials.reordered(1) == [10, 30, 60, 100]
    assert dials.reordered(10) == [30, 60, 100, 200]
    assert dials.reordered(100) == [200, 300, 600, 1000]
    for n_classes in (200, 10_000, 49_152):
        assert all(
            dial.settings["probes"] <= dial.settings["lists"] <= n_classes // 4
            for dial in [*dials.ivf(n_classes), *dials.codes(n_classes, 10)]
        )
        assert all(
            dial.settings["searched"] <= dial.settings["leaves"] <= n_classes // 8
            for dial in dials.scann(n_classes, 10)
        )
        assert dials.ivf(n_classes) and dials.codes(n_classes, 100)
        assert all(
            round(dial.settings["share"] * n_classes) >= 100
            for dial in dials.svd(n_classes, 200, 100)
        )


# --- the first pass ----------------------------------------------------------------------------


def tried(microseconds: float, missed: int, k: int = 10) -> Tried:
    nobody = Contestant("", "some", PEER, {}, one=len, answers=np.asarray, many=len, k=k)
    return Tried(nobody, microseconds, missed)


def test_who_is_clearly_slower_and_misses_no_less_goes() -> None:
    quick, near, slow, better = tried(10, 5), tried(11, 5), tried(12, 5), tried(30, 4)
    assert unbeaten([quick, near, slow, better]) == [quick, near, better]
    assert unbeaten([quick, tried(12, 5, k=1)]) == [quick, tried(12, 5, k=1)]


def test_in_doubt_a_setting_stays() -> None:
    quick, none_missed, clearly = tried(10, 4), tried(1, 0), tried(12, 7)
    assert unbeaten([quick, tried(12, 6)], doubt=1.0) == [quick, tried(12, 6)]
    assert unbeaten([quick, clearly], doubt=1.0) == [quick]
    # Where a few rows show no miss of either, only more rows can tell.
    assert len(unbeaten([none_missed, tried(4, 0)], doubt=1.0)) == 2
    assert unbeaten([none_missed, tried(4, 0)]) == [none_missed]
    assert unbeaten([none_missed, tried(6, 0)], doubt=1.0) == [none_missed]


def test_all_rows_decide_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick setting that misses in rows that are not asked first does not hide a better one."""
    head = Head(random_rows(30, 8, 1), None)
    data = queries.queries(head, random_rows(80, 8, 2))
    late = np.array(data.best[:, :1])
    late[1::8] = -1

    def setting(name: str, answers: np.ndarray) -> Contestant:
        by_row = {row.tobytes(): answer for row, answer in zip(data.wide, answers, strict=True)}

        def look_up(rows: np.ndarray) -> np.ndarray:
            return np.array([by_row[row.tobytes()] for row in rows])

        return Contestant(name, "some", PEER, {}, one=look_up, answers=look_up, many=look_up, k=1)

    times = {"wrong": 1.0, "late": 2.0, "right": 4.0, "right, slower": 5.0, "slowest": 40.0}
    monkeypatch.setattr(first_pass, "quick_time", lambda each, _: times[each.name])
    best = data.best[:, :1]
    field = [
        setting("wrong", best * 0 - 1),
        setting("late", late),
        setting("right", best),
        setting("right, slower", best),
        setting("slowest", best),
    ]
    kept = shortlist(field, data, {1: 20.0})
    assert [each.contestant.name for each in kept] == ["wrong", "late", "right"]
    assert [each.missed for each in kept] == [80, 10, 0]
    assert [each.recall(data) for each in kept] == [0.0, 0.875, 1.0]
    # A method all of whose settings are slower than a scan is there with its quickest.
    assert [each.contestant.name for each in shortlist(field[2:], data, {1: 0.1})] == ["right"]


# --- from end to end ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "modes"),
    [("fidelity4", {"recall promised", "exact"}), ("head4", {"rescored", "exact"})],
)
def test_every_mode_of_a_bundle_with_a_head_takes_part(name: str, modes: set[str]) -> None:
    made = bundle.read(GOLDEN / name, head=True)
    assert made.rows is not None
    data = queries.queries(
        Head(made.rows.weights, made.rows.bias), random_rows(20, made.manifest.hidden_size, 4)
    )
    found = [each for each in our_dials("ours", made, [1, 10]) if each.k == 10]
    assert {each.method for each in found} >= {f"ours, {mode}" for mode in {"experts", *modes}}
    (exact,) = (each for each in found if each.name == "ours, exact")
    assert queries.missed_by(exact, data) == 0


def write_capture(folder: Path, *, valid: int) -> Path:
    rng = np.random.default_rng(0)
    weight = random_rows(TINY.n_classes, TINY.hidden_size, 2)

    def piece(split: str, rows: int) -> Piece:
        hidden = rng.normal(size=(rows, TINY.hidden_size)).astype(np.float32)
        return Piece(split, rows, lambda: (hidden, np.zeros(rows, np.int64)))

    pieces = [piece("train", 10), *([piece("valid", valid)] if valid else [])]
    write_pieces(Source(weight, pieces, 10 + valid, {}), folder, "fp32")
    return folder


def test_a_tiny_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "HASTY", curves.Effort(rounds=2, microseconds=50, most_calls=5))
    monkeypatch.setattr(dials, "WIDTHS", (10, 100, 200))
    captured = write_capture(tmp_path / "captured", valid=40)
    write_random(tmp_path / "tiny/1", TINY)
    write_random(tmp_path / "tiny/2", TINY, precision="int8")
    document = tmp_path / "page.md"
    document.write_text("<!-- curves:begin -->\n<!-- curves:end -->\n")
    options = ["--title", "Tiny", "--out", tmp_path / "curves.json", "--images", tmp_path]
    given = ["--capture", captured, "--document", document]
    for version in "12":
        given += ["--bundle", tmp_path / "tiny" / version]
    result = CliRunner().invoke(
        curves.main, ["--quick", *map(str, [*options, *given])], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output

    run = json.loads((tmp_path / "curves.json").read_text())["Tiny"]
    assert run["rows"] == 40
    by_name = {(each["name"], each["k"]): each for each in run["points"]}
    for k in (1, 10, 100):
        assert by_name["ONNX Runtime fp32", k]["recall"] == 1.0
        assert by_name["tiny/1, experts 1", k]["recall"] < 0.9  # its numbers are random
        assert ("tiny/2, experts 4", k) in by_name
    ours = {each["method"] for each in run["points"] if each["kind"] == OURS}
    assert ours == {"tiny/1, experts", "tiny/2, experts"}
    absent = {each["method"] for each in run["absent"]}
    expected = {"FAISS IVF-Flat", "FAISS IVF-PQ FastScan", "FAISS IVF-RaBitQ", "FAISS HNSW"}
    assert expected - absent <= {each["method"] for each in run["points"]}
    assert set(run["tried"]) | absent >= expected
    assert all(0 <= each["recall"] <= 1 for each in run["points"])
    assert all(
        each["queries_per_second"] == round(1e6 / each["mean_us"], 1) for each in run["points"]
    )
    assert "time of the fastest other / ours" in document.read_text()
    assert (tmp_path / "curves-tiny.svg").stat().st_size > 1000


def test_recall_is_that_of_held_out_rows(tmp_path: Path) -> None:
    captured = write_capture(tmp_path / "captured", valid=30)
    data = queries.read_queries(read_capture(captured), 10)
    assert data.hidden.shape == (10, TINY.hidden_size)
    assert np.array_equal(data.best, full_topk(data.hidden, data.head, 100))
    assert data.ks == [1, 10, 100]


def test_a_capture_without_held_out_rows_is_refused(tmp_path: Path) -> None:
    captured = write_capture(tmp_path / "captured", valid=0)
    result = CliRunner().invoke(curves.main, ["--quick", "--capture", str(captured)])
    assert result.exit_code == 1 and "has no held-out rows" in result.output
    result = CliRunner().invoke(curves.main, ["--quick"])
    assert result.exit_code == 2 and "--capture is needed." in result.output
