"""The page of a report: every number, pictures inside it, and what is missing is said."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.training.report_runs import (
    COMMAND,
    FREQUENCIES,
    WORDS,
    Parsed,
    tiny_layer,
    tiny_results,
    write_language_model,
    write_layer,
    write_synthetic,
)
from matplotlib.image import imread

from trainer.data import run_folder
from trainer.data.files import write_json
from trainer.report import paper_tables, report
from trainer.report import runs as report_data


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    run = write_language_model(folder / "runs" / "tiny ptb")
    report.write([run], folder / "out", COMMAND)
    return folder / "out"


@pytest.fixture(scope="module")
def page(out: Path) -> str:
    return (out / "report.html").read_text()


def test_the_page_shows_every_measured_number(page: str) -> None:
    text, results = Parsed(page).text, tiny_results()
    stages = results["mitosis"]["stages"]
    for measured in [*results["comparison"]["points"], *stages]:
        if "skipped" in measured:
            assert measured["skipped"] in text
            continue
        shares = [*measured["accuracy"].values(), *measured.get("precision", {}).values()]
        assert all(f"{share:.4f}" in text for share in shares)
        assert f"{measured['flops_speedup']:.2f}\u00d7" in text
        if measured in stages:
            assert f"{measured['rows']:,}" in text
            assert f"{measured['peak_memory']:.2f}" in text
        else:
            assert f"{measured['latency_us']:,.1f}" in text
            assert f"{measured['train_seconds']:,.1f} s" in text
            assert f"{measured['build_seconds']:,.1f} s" in text
    for number in ("82,430", "127.55", "120.54", "101.4 s", "2.07", "34.5\u00d7", "211"):
        assert number in text


def test_published_numbers_stand_beside_ours(page: str) -> None:
    text = Parsed(page).text
    rows = [*paper_tables.DEVICE["ptb"], *paper_tables.LANGUAGE_MODELS["ptb"]]
    rows += paper_tables.MITOSIS["ptb"].values()
    for row in rows:
        assert all(f"\n{share:.3f}\n" in text for share in row.accuracy.values())
        assert row.flops_speedup is None or f"\n{row.flops_speedup:.2f}\u00d7\n" in text
    assert "published, on the authors' encoder" in text
    assert "Table 3, SVD inside the experts, is on WikiText-2 only" in text


def test_the_page_needs_nothing_else(page: str) -> None:
    assert not re.search(r"https?:|//|@import|url\(", re.sub(r'src="data:[^"]*"', "", page))
    parsed = Parsed(page)
    assert all(source.startswith("data:image/png;base64,") for source in parsed.sources())
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in parsed.tags}
    for _, attributes in parsed.tags:
        assert (attributes.get("href") or "#").startswith("#")
        assert not any(name.startswith("on") for name in attributes)


def test_pictures_lie_beside_the_page_and_in_it(out: Path, page: str) -> None:
    inline = {base64.b64decode(s.partition(",")[2]) for s in Parsed(page).sources()}
    files = sorted(out.glob("*.png"))
    assert inline == {path.read_bytes() for path in files}
    assert [path.name.removeprefix("tiny-ptb-") for path in files] == [
        "accuracy-flops.png",
        "accuracy-latency.png",
        "kept-experts.png",
        "kept-redundancy.png",
        "kept-utilization.png",
        "memory.png",
    ]
    for path in files:
        picture = imread(path)
        assert picture.shape[0] > 300
        assert picture.shape[1] > 800
        assert len(np.unique(picture[..., 0])) > 20  # shades of ink, not one flat colour


def test_words_are_escaped(page: str) -> None:
    for word in WORDS[:2]:
        assert word not in page
    assert "<script>" not in page
    assert "a&b" not in page
    text = Parsed(page).text
    assert "<script>alert(1)</script>" in text
    assert "<unk>" in text
    assert "An <odd> CPU" in text


def test_json_has_the_numbers_as_they_were_measured(out: Path) -> None:
    results, numbers = tiny_results(), json.loads((out / "report.json").read_text())
    (run,) = numbers["runs"]
    assert run["points"] == [p for p in results["comparison"]["points"] if "skipped" not in p]
    assert run["memory"] == results["mitosis"]["memory"]
    assert run["layers"]["kept"]["expert_sizes"] == [6, 7, 7]
    assert sum(run["layers"]["kept"]["classes_by_copies"]) == 12
    assert numbers["command"] == COMMAND


def test_classes_in_an_unused_expert_are_called_out_of_reach(out: Path, page: str) -> None:
    (run,) = json.loads((out / "report.json").read_text())["runs"]
    only_in_the_third = [c for c in range(4, 12) if c % 3 == 2]
    assert run["layers"]["kept"]["classes_out_of_reach"] == len(only_in_the_third) == 3
    assert "3 of 12 classes are only in experts" in Parsed(page).text


def test_smallest_experts_list_rare_words_most_frequent_first(out: Path) -> None:
    (run,) = json.loads((out / "report.json").read_text())["runs"]
    experts = {entry["expert"]: entry for entry in run["layers"]["kept"]["smallest_experts"]}
    assert 2 not in experts  # hardly used
    assert experts[0]["words"] == ["<unk>", "<eos>", "the", "a&b", "gnu", "jam"]


# --- what is missing is said --------------------------------------------------------------------


def test_missing_pieces_are_said_and_not_drawn(tmp_path: Path) -> None:
    results = tiny_results()
    results["mitosis"] = None
    comparison = results["comparison"]
    comparison["points"] = [p for p in comparison["points"] if p["method"] != "full-retrained"]
    for measured in comparison["points"]:
        measured["latency_us"] = None
    run = write_language_model(tmp_path / "run", results)
    text = Parsed(report.write([run], tmp_path / "out", COMMAND).page).text
    assert "No layer was grown by mitosis in this run." in text
    assert "Latencies were not measured, so there is no curve over time." in text
    assert "ScaNN was left out: There is no package for this machine." in text
    assert "retrained as long, was not run" in text
    names = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert not {name for name in names if "memory" in name or "latency" in name}


def test_without_test_rows_the_page_says_validation(tmp_path: Path) -> None:
    results = tiny_results()
    comparison = results["comparison"]
    comparison["points"] = [p for p in comparison["points"] if p.get("split") != "test"]
    comparison["full"]["test"] = comparison["rows"]["test"] = None
    run = write_language_model(tmp_path / "run", results)
    text = Parsed(report.write([run], tmp_path / "out", COMMAND).page).text
    assert "measured on the validation split (73,760 words)" in text
    assert "\nvalidation split\n" in text


def test_a_layer_by_itself_has_a_page(tmp_path: Path) -> None:
    run = write_layer(tmp_path / "own", tiny_layer(dropped=7), [0.5, 0.25, 0.25], speedup=1.5)
    lines = [{"step": i, "experts": 2 + 2 * (i > 2), "rows": 9, "memory": 1.9} for i in range(5)]
    write_json(run / run_folder.GROWTH, {"peak_memory": 1.9, "stages": [], "memory": lines})
    written = report.write([run], tmp_path / "out", COMMAND)
    text = Parsed(written.page).text
    for shown in ("0.2512", "0.2468", "1.23\u00d7", "6.8", "1.667", "12.3 s"):
        assert shown in text
    assert {*written.pictures} == {"own-memory.png", "own-experts.png", "own-utilization.png"}
    assert "copies are not drawn against frequency" in text
    assert "no words are listed" in text
    assert "dss train" in text


def test_memory_is_read_where_the_run_logged_it(tmp_path: Path) -> None:
    run = write_layer(tmp_path / "own", tiny_layer(), [1.0, 0.0, 0.0])
    points = [{"step": i, "experts": 2, "rows": 9, "memory": 1.9 - i} for i in range(2)]
    (run / run_folder.GROWTH).write_text(json.dumps({"memory": points}))
    opened = report_data.open_run(run)
    assert isinstance(opened, report_data.LayerRun)
    assert [point.memory for point in opened.memory] == [1.9, pytest.approx(0.9)]
    (run / run_folder.GROWTH).write_text("{")
    with pytest.raises(report_data.RunUnreadable):
        report_data.open_run(run)


def test_words_and_frequencies_are_found_beside_the_labels(tmp_path: Path) -> None:
    language_model = write_language_model(tmp_path / "lm")
    labels = language_model / "hidden" / "train.labels.npy"
    run = write_layer(tmp_path / "own", tiny_layer(), [0.5, 0.25, 0.25], labels=str(labels))
    opened = report_data.open_run(run)
    assert isinstance(opened, report_data.LayerRun)
    assert opened.layer.words == WORDS
    assert opened.layer.frequencies is not None
    assert opened.layer.frequencies.tolist() == FREQUENCIES


def test_several_runs_share_a_page(tmp_path: Path) -> None:
    folders = [
        write_language_model(tmp_path / "a" / "run", tiny_results("wikitext")),
        write_layer(tmp_path / "b" / "run", tiny_layer(), [1.0, 0.0, 0.0]),
        write_synthetic(tmp_path / "synthetic"),
    ]
    written = report.write(folders, tmp_path / "out", COMMAND)
    parsed = Parsed(written.page)
    assert [a["id"] for tag, a in parsed.tags if tag == "h2"] == ["run", "run-2", "synthetic"]
    assert [a["href"] for tag, a in parsed.tags if tag == "a"] == ["#run", "#run-2", "#synthetic"]
    assert {"run-kept-experts.png", "run-2-experts.png", "synthetic-experts.png"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    assert "0.8750" in parsed.text  # purity
    assert "WikiText-2" in parsed.text
    assert "32.77\u00d7" in parsed.text  # Table 3
