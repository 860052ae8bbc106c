"""The comparison of engines: its ratios and tables, and one tiny run from end to end."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.document import MarkersMissing, with_part
from benchmarks.engines import (
    __main__,
    graph_indexes,
    measure,
    ratios,
    report,
    scaling,
    scaling_report,
)
from benchmarks.engines.byte_floor import ByteFloor
from benchmarks.engines.contestants import FULL, OURS, PEER, some
from benchmarks.engines.random_bundles import Shape, random_rows, write_random
from benchmarks.engines.timing import Times, Turn, in_turns, summary
from trainer.baselines.method import PackageMissing

TINY = Shape(n_classes=200, n_experts=4, held=60, hidden_size=16)
FULL_ACCURACY = {"1": 0.2, "5": 0.4, "10": 0.5}


def point(
    name: str,
    kind: str,
    microseconds: float,
    *,
    batch: float = 1.0,
    accuracy: float = 0.0,
    precision: float = 1.0,
    **facts: object,
) -> dict[str, Any]:
    """`accuracy` is how much it is above the full softmax's."""
    return {
        "name": name,
        "method": name.split()[0],
        "kind": kind,
        "dial": {},
        "one": {"mean_us": microseconds, "p50_us": microseconds, "p99_us": microseconds},
        "many": {"mean_us": batch},
        "accuracy": {k: share + accuracy for k, share in FULL_ACCURACY.items()},
        "precision": dict.fromkeys(("1", "5", "10"), precision),
        **facts,
    }


def ours(name: str, microseconds: float, **facts: Any) -> dict[str, Any]:
    own = {"bundle": "ds", "dial": {"experts": 1}, "floor_us": 4.0, "flops_speedup": 40.0}
    return point(name, OURS, microseconds, accuracy=0.01, **{**own, **facts})


def a_run(n_classes: int = 33_278) -> dict[str, Any]:
    found = {
        "command": "python -m benchmarks.engines",
        "machine": {"cpu": "Processor", "cores": 2, "python": "3"},
        "n_classes": n_classes,
        "hidden_size": 200,
        "k": 10,
        "rows": 100,
        "rounds": 3,
        "full_accuracy": FULL_ACCURACY,
        "absent": [{"method": "ScaNN", "reason": "Install scann for this."}],
        "floors": [],
        "contestants": [
            ours("ds, compiled", 6.0, batch=2.0),
            ours("ds, onnx", 60.0, batch=9.0),
            ours("ds, compiled, 2 experts", 1.0, dial={"experts": 2}),
            point("ONNX Runtime fp32", FULL, 180.0, batch=30.0),
            point("ONNX Runtime int8", FULL, 90.0, batch=3.0),
            point("torch", FULL, 200.0, batch=24.0),
            point("numpy", FULL, 220.0, batch=40.0),
            point("graph ef=10", PEER, 15.0, accuracy=-0.1, precision=0.9),
            point("graph ef=64", PEER, 45.0, accuracy=-0.01, precision=0.99),
            point("graph ef=256", PEER, 90.0, precision=0.999),
            point("wonder", PEER, 0.5, accuracy=0.02),
        ],
    }
    return {**found, "ratios": ratios.ratios(found)}


# --- ratios ------------------------------------------------------------------------------------


def test_ratios_are_of_the_fastest_backend_with_one_expert() -> None:
    (found,) = a_run()["ratios"]
    assert found["ours"] == "ds, compiled"
    assert found["full"] == 30.0
    assert found["floor"] == 1.5
    assert found["time_of_flops"] == 0.75
    assert (found["batch"], found["batch_name"]) == (12.0, "torch")  # of the exact ones


def test_a_more_accurate_peer_does_not_count() -> None:
    (found,) = a_run()["ratios"]
    assert (found["peer"], found["peer_name"]) == (2.5, "graph ef=10")
    assert (found["precise_peer"], found["precise_peer_name"]) == (7.5, "graph ef=64")


def test_time_follows_flops_only_where_there_are_many_classes() -> None:
    (found,) = a_run(n_classes=10_000)["ratios"]
    assert found["time_of_flops"] is None


def test_a_bundle_below_the_full_softmax_is_told() -> None:
    run = a_run()
    run["contestants"][0]["accuracy"]["5"] = 0.39
    (found,) = ratios.ratios(run)
    assert not found["as_accurate_as_full"]
    assert found["peer_name"] == "graph ef=10"


def test_without_peers_there_is_no_ratio() -> None:
    run = a_run()
    run["contestants"] = [each for each in run["contestants"] if each["kind"] != PEER]
    (found,) = ratios.ratios(run)
    assert found["peer"] is None
    assert found["precise_peer_name"] is None


def test_a_dial_is_shown_by_three_settings() -> None:
    dial = [
        point("fast", PEER, 1.0, precision=0.5),
        point("dominated", PEER, 30.0, precision=0.7),
        point("precise", PEER, 20.0, precision=0.99),
        point("slower", PEER, 25.0, precision=0.995),
        point("most", PEER, 90.0, precision=1.0),
        point("as much, later", PEER, 95.0, precision=1.0),
    ]
    assert [each["name"] for each in ratios.worth_a_line(dial)] == [
        "fast",
        "precise",
        "most",
    ]
    assert ratios.worth_a_line([]) == []


def test_the_line_of_a_dial_only_rises() -> None:
    dial = [point(str(at), PEER, at, precision=share) for at, share in enumerate((0.5, 0.4, 0.9))]
    assert [each["name"] for each in report.front(dial, "precision")] == ["0", "2"]


def test_few_settings_are_spread_over_the_dial() -> None:
    assert some(range(9), quick=True) == [0, 4, 8]
    assert some(range(9), quick=False) == range(9)
    assert some([1, 2], quick=True) == [1, 2]


# --- tables ------------------------------------------------------------------------------------


def test_a_part_of_a_document_is_replaced() -> None:
    text = "before\n<!-- x:begin -->\nold\n<!-- x:end -->\nafter\n"
    once = with_part(text, "x", "new\n")
    assert once == "before\n<!-- x:begin -->\nnew\n<!-- x:end -->\nafter\n"
    assert with_part(once, "x", "new") == once


@pytest.mark.parametrize("text", ["", "<!-- x:begin -->", "<!-- x:end --><!-- x:begin -->"])
def test_a_document_without_markers_is_refused(text: str) -> None:
    with pytest.raises(MarkersMissing):
        with_part(text, "x", "new")


def test_tables_state_ratios_points_and_machine() -> None:
    text = report.markdown({"Corpus": a_run()}, {"Corpus": "images/corpus.svg"})
    lines = text.splitlines()
    assert "| full scan, ONNX Runtime fp32 / ours, one row | >= 20 | 30.00 |" in lines
    assert any(line.endswith("| <= 1.5 | 1.50 |") for line in lines)
    assert any(line.startswith("| graph ef=64 | 0.1900 / 0.3900 / 0.4900 |") for line in lines)
    assert "python -m benchmarks.engines" in lines
    assert "Absent: ScaNN (Install scann for this.)" in lines
    widths = {line.count(" | ") for line in lines if line.startswith("| graph")}
    assert widths == {6}


def scaling_point(n_classes: int, our_time: float, full_time: float) -> dict[str, Any]:
    return {
        "n_classes": n_classes,
        "microseconds_per_row": {"ours": {"mean_us": our_time}, "numpy": {"mean_us": full_time}},
        "fastest_full_scan": "numpy",
    }


def test_the_crossover_is_told_in_words() -> None:
    said = scaling_report.crossover
    slow, fast = scaling_point(100, 8, 5), scaling_point(1000, 8, 20)
    assert said([slow, fast], "n_classes") == ("ours is faster from 1,000 on (at 100 it was not)")
    assert said([fast, fast], "n_classes").startswith("ours is faster all the way")
    assert said([slow, slow], "n_classes").startswith("a full scan is faster all the way")


# --- measuring ---------------------------------------------------------------------------------


def test_bundles_are_named_apart() -> None:
    assert measure.names_of([Path("a/ds/1"), Path("a/int8/1")]) == ["ds", "int8"]
    assert measure.names_of([Path("a/ds/1"), Path("a/ds/2")]) == ["ds/1", "ds/2"]
    assert measure.names_of([Path("a/ds/1"), Path("b/ds/1")]) == ["a/ds/1", "b/ds/1"]


def test_answers_are_compared_with_labels_and_best() -> None:
    best = np.arange(10)[None]
    answers = np.array([[1, 0, 2, 3, 4, 90, 91, 92, 93, 94]])
    found = measure.compared(answers, np.array([0]), best)
    assert found["accuracy"] == {"1": 0.0, "5": 1.0, "10": 1.0}
    assert found["precision"] == {"1": 0.0, "5": 1.0, "10": 0.5}


def test_everybody_has_a_turn_in_every_round() -> None:
    turns: list[int] = []

    def turn(place: int) -> Turn:
        def calls() -> Times:
            turns.append(place)
            return np.array([10.0 * place, 30.0 * place])

        return calls

    times = in_turns([turn(1), turn(2)], rounds=8)
    assert sorted(turns) == [1] * 8 + [2] * 8
    assert {tuple(turns[at : at + 2]) for at in range(0, 16, 2)} == {(1, 2), (2, 1)}
    assert summary(times[1], rows=2)["mean_us"] == 20.0


def test_the_floor_counts_the_gate_and_the_chosen_expert() -> None:
    floor = ByteFloor(gate_bytes=80, expert_bytes=np.array([800, 1600]))
    assert floor.bytes_per_row(np.array([0, 0])) == 880
    assert floor.bytes_per_row(np.array([0, 1])) == 1280
    assert floor.microseconds(np.array([1, 0, 1])) > 0
    figures = floor.figures(np.array([0, 1]), [np.array([2.0]), np.array([1.28])])
    assert figures["floor_us"] == 1.28
    assert figures["gigabytes_per_second"] == 1.0


def test_the_floor_of_a_bundle_is_by_its_precision(tmp_path: Path) -> None:
    gate = 4 * TINY.n_experts * TINY.hidden_size
    for precision, size in (("fp32", 4), ("int8", 1)):
        made = write_random(tmp_path / precision, TINY, precision=precision)
        needed = ByteFloor.of(made).bytes_per_row(np.array([0, 3]))
        assert needed == gate + size * TINY.held * TINY.hidden_size


def test_shapes_keep_the_speedup_and_every_class() -> None:
    usual = scaling.Setting().shape
    assert 30 <= usual.flops_speedup <= 50
    for n_classes in scaling.N_CLASSES:
        shape = scaling.with_experts(n_classes).shape
        assert shape.held * shape.n_experts >= n_classes
    assert scaling.Setting(k=100, n_classes=500, n_experts=50).shape.held >= 100


# --- from end to end ---------------------------------------------------------------------------


def test_a_tiny_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = graph_indexes.imported

    def without_usearch(module: str, package: str) -> ModuleType:
        if package == "usearch":
            raise PackageMissing("Install usearch for this.")
        return imported(module, package)

    monkeypatch.setattr(graph_indexes, "imported", without_usearch)
    monkeypatch.setattr(__main__, "HASTY", measure.Effort(rounds=2, calls=5, batches=1, batch=8))
    monkeypatch.setattr(__main__, "LARGE_EXPERTS", TINY)
    write_random(tmp_path / "tiny/1", TINY)
    hidden, head = random_rows(40, TINY.hidden_size, 1), random_rows(TINY.n_classes, 16, 2)
    np.save(tmp_path / "hidden.npy", hidden)
    np.save(tmp_path / "head.npy", head)
    np.save(tmp_path / "labels.npy", (hidden @ head.T).argmax(axis=1))
    document = tmp_path / "page.md"
    document.write_text("<!-- engines:begin -->\n<!-- engines:end -->\n")

    options = {
        "--bundle": tmp_path / "tiny/1",
        "--hidden": tmp_path / "hidden.npy",
        "--labels": tmp_path / "labels.npy",
        "--head": tmp_path / "head.npy",
        "--title": "Tiny",
        "--out": tmp_path / "results.json",
        "--images": tmp_path,
        "--document": document,
    }
    given = [str(part) for pair in options.items() for part in pair]
    result = CliRunner().invoke(__main__.main, ["--quick", *given], catch_exceptions=False)
    assert result.exit_code == 0, result.output

    run = json.loads((tmp_path / "results.json").read_text())["Tiny"]
    points = {each["name"]: each for each in run["contestants"]}
    assert {"method": "usearch", "reason": "Install usearch for this."} in run["absent"]
    assert run["full_accuracy"]["1"] == 1.0
    for name in ("ONNX Runtime fp32", "torch", "numpy"):
        assert points[name]["precision"] == {"1": 1.0, "5": 1.0, "10": 1.0}
        assert points[name]["accuracy"]["1"] == 1.0
    assert {"tiny, compiled", "tiny, onnx", "tiny, onnx, 4 experts"} <= points.keys()
    assert points["tiny, compiled"]["accuracy"] == points["tiny, onnx"]["accuracy"]
    assert all(len(each["one"]["round_means_us"]) == 2 for each in points.values())
    assert all(each["one"]["mean_us"] > 0 < each["many"]["mean_us"] for each in points.values())
    assert [each["precision"] for each in run["floors"]] == ["fp32", "fp32", "int8"]
    assert [each["bundle"] for each in run["ratios"]] == ["tiny"]
    assert "| tiny, compiled |" in document.read_text()
    assert (tmp_path / "engines-tiny.svg").stat().st_size > 1000

    again = [
        str(part) for name in ("--out", "--images", "--document") for part in (name, options[name])
    ]
    before = document.read_text()
    document.write_text("<!-- engines:begin -->\n<!-- engines:end -->\n")
    rendered = CliRunner().invoke(__main__.main, ["--render", *again], catch_exceptions=False)
    assert rendered.exit_code == 0, rendered.output
    assert document.read_text() == before


def test_a_tiny_sweep(tmp_path: Path) -> None:
    settings = tuple(
        scaling.Setting(n_classes=n, n_experts=4, hidden_size=8, batch=batch)
        for n, batch in ((50, 1), (100, 1), (100, 4))
    )
    sweeps = [scaling.Sweep("classes", "n_classes", settings)]
    effort = scaling.Effort(rounds=2, microseconds=100)
    said: list[str] = []
    results = scaling.run(sweeps, effort, said.append)
    assert len(said) == 3
    points = results["sweeps"][0]["points"]
    assert [each["floor"] is None for each in points] == [False, False, True]
    names = {"ours", "ONNX Runtime fp32", "torch", "numpy"}
    assert all(each["microseconds_per_row"].keys() == names for each in points)
    assert all(each["fastest_full_scan"] in names - {"ours"} for each in points)
    scaling_report.draw(results, tmp_path / "scaling.svg")
    assert (tmp_path / "scaling.svg").stat().st_size > 1000
    text = scaling_report.markdown(results, "scaling.svg")
    assert text.count("\n| 100 |") == 2


def test_missing_options_are_asked_for() -> None:
    result = CliRunner().invoke(__main__.main, ["--quick"])
    assert result.exit_code == 2
    assert "--bundle, --hidden, --labels and --head are needed." in result.output
