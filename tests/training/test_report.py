import base64
import copy
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from service.cli import main
from service.errors import DSSError
from trainer.data import run_folder
from trainer.data.files import write_json
from trainer.layer import DSSoftmax
from trainer.report import layer_figures, paper_tables, report, trade_off
from trainer.report import runs as report_data

WIDTH = 4
WORDS = ["<unk>", "<eos>", "the", "a&b", "<script>alert(1)</script>", "fig", "gnu", "hat"]
WORDS += ["ink", "jam", "kit", "lip"]
FREQUENCIES = [90, 70, 50, 30, 20, 10, 6, 4, 3, 2, 1, 1]
COMMAND = "dss report there --out here"
FULL = {"valid": {"1": 0.21, "5": 0.41, "10": 0.51}, "test": {"1": 0.22, "5": 0.42, "10": 0.52}}


def tiny_layer(*, dropped: int | None = None) -> DSSoftmax:
    """Three experts; the first four classes are in all of them, the others in one."""
    pairs = [(k, c) for k in range(3) for c in range(12) if c < 4 or c % 3 == k]
    keys = torch.tensor([k * 12 + c for k, c in pairs if c != dropped])
    return DSSoftmax(WIDTH, 12, 3, keys=keys)


def write_layer(folder: Path, layer: DSSoftmax, utilization: list[float], **config: object) -> Path:
    folder.mkdir(parents=True)
    write_json(folder / run_folder.CONFIG, {"task": "vectors", "n_experts": 3, "seed": 0, **config})
    run_folder.save_layer(folder, layer, np.zeros((2, WIDTH), np.float32))
    summary = {
        "task": "vectors",
        "accuracy": 0.2512,
        "full_accuracy": 0.2468,
        "mean_copies": 1.6667,
        "mean_rows": 6.75,
        "flops_speedup": 1.2308,
        "utilization": utilization,
        "seconds": 12.3,
        "on": "validation vectors",
    }
    write_json(folder / run_folder.SUMMARY, summary)
    return folder


def point(method: str, name: str, split: str, seed: int, **more: object) -> dict[str, Any]:
    """A measurement whose every number occurs nowhere else."""
    rng = np.random.default_rng([seed, split == "test"])
    accuracy = np.sort(0.19 + 0.3 * rng.random(3)).round(5).tolist()
    precision = np.sort(0.6 + 0.3 * rng.random(3)).round(5).tolist()
    return {
        "method": method,
        "name": name,
        "dial": {},
        "split": split,
        "chosen": False,
        "paper": None,
        "accuracy": dict(zip(("1", "5", "10"), accuracy, strict=True)),
        "precision": dict(zip(("1", "5", "10"), precision, strict=True)),
        "flops_speedup": round(1 + 90 * rng.random(), 3),
        "latency_us": round(20 + 300 * rng.random(), 2),
        "train_seconds": round(1 + 600 * rng.random(), 2),
        "build_seconds": round(1 + 9 * rng.random(), 2),
    } | more


def tiny_results(corpus: str = "ptb") -> dict[str, Any]:
    def layer(title: str, **more: object) -> dict[str, Any]:
        common = {"paper": None, "keep_one": True, "n_experts": 3, "method": "warm"}
        return {"title": title, "speedup_asked": 34.5, "train_seconds": 101.4, "svd": None} | (
            common | more
        )

    points: list[dict[str, Any]] = [
        {**point("full", "full softmax", s, 1, flops_speedup=1.0), "accuracy": FULL[s]}
        for s in ("valid", "test")
    ]
    for seed, (method, paper) in enumerate(
        [
            ("full-retrained", None),
            ("full-int8", None),
            ("svd", "SVD-10"),
            ("svd", None),
            ("d-softmax", "D-Softmax"),
            ("adaptive", None),
            ("fgd", "FGD-H"),
            ("screening", None),
            ("faiss-ivf", None),
        ],
        start=10,
    ):
        points.append(point(method, f"{method} {seed}", "valid", seed, paper=paper))
        if paper or method == "full-retrained":
            points.append(point(method, f"{method} {seed}", "test", seed, paper=paper, chosen=True))
    layers = {
        "kept": layer("DS-64", paper="DS-64"),
        "free": layer("DS-64*", paper="DS-64*", keep_one=False),
        "grown": layer("DS-64 grown", method="mitosis", n_experts=2),
        "inside": layer("D64+S50", paper="D64+S50", svd={"window": 16, "share": 0.5, "above": 9}),
    }
    for seed, name in enumerate(layers, start=30):
        for searched in (1, 2):
            dial = {"experts_searched": searched}
            points.append(point("ds", name, "valid", 100 * searched + seed, dial=dial))
        points.append(point("ds", name, "test", seed, dial={"experts_searched": 1}, chosen=True))
    points.append({"method": "scann", "skipped": "There is no package for this machine."})
    return {
        "task": "language-model",
        "corpus": corpus,
        "encoder": {
            "corpus": corpus,
            "trained_here": False,
            "valid": {"perplexity": 127.549, "accuracy": FULL["valid"]},
            "test": {"perplexity": 120.536, "accuracy": FULL["test"]},
        },
        "layers": layers,
        "comparison": {
            "n_classes": 12,
            "hidden_size": WIDTH,
            "machine": {"cpu": "An <odd> CPU", "cores": 2},
            "rows": {"valid": 73_760, "test": 82_430},
            "full": copy.deepcopy(FULL),
            "points": points,
        },
        "mitosis": {
            "layer": "grown",
            "peak_memory": 2.07,
            "stages": [
                {
                    "experts": experts,
                    "accuracy": {"1": 0.2 + i, "5": 0.3 + i, "10": 0.4 + i},
                    "flops_speedup": 1.77 * experts,
                    "split": "valid",
                    "peak_memory": 2.07 - i,
                    "rows": 12_345 - experts,
                }
                for experts, i in ((2, 0.011), (4, 0.022))
            ],
            "memory": [
                {"step": step, "experts": 2 if step < 5 else 4, "memory": 2.07 - 0.1 * (step % 5)}
                for step in range(10)
            ],
        },
    }


def write_language_model(folder: Path, results: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    results = tiny_results() if results is None else results
    write_json(
        folder / run_folder.CONFIG, {"task": "language-model", "corpus": "ptb", "units": 211}
    )
    write_json(folder / "results.json", results)
    (folder / "hidden").mkdir()
    (folder / "hidden" / "labels.txt").write_text("".join(f"{word}\n" for word in WORDS))
    np.save(folder / "hidden" / "train.labels.npy", np.repeat(np.arange(12), FREQUENCIES))
    write_layer(folder / "layers" / "kept", tiny_layer(), [0.5, 0.4995, 0.0005])
    return folder


def write_synthetic(folder: Path) -> Path:
    write_layer(folder, tiny_layer(), [0.25, 0.25, 0.5], task="synthetic", size="3x4")
    summary = json.loads((folder / run_folder.SUMMARY).read_text())
    write_json(
        folder / run_folder.SUMMARY,
        {**summary, "task": "synthetic", "size": "3x4", "purity": 0.875},
    )
    return folder


class Parsed(HTMLParser):
    """Tags and attributes of a page, and its visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"

    def sources(self) -> list[str]:
        return [attributes["src"] or "" for tag, attributes in self.tags if tag == "img"]


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


# --- refused ------------------------------------------------------------------------------------


def no_run(folder: Path) -> None:
    (folder / "config.json").unlink()


def unknown_task(folder: Path) -> None:
    write_json(folder / "config.json", {"task": "chess"})


def no_results(folder: Path) -> None:
    (folder / "results.json").unlink()


def no_vocabulary(folder: Path) -> None:
    (folder / "hidden" / "labels.txt").unlink()


def no_layer(folder: Path) -> None:
    (folder / "layers" / "kept" / "layer.npz").unlink()


def broken_layer(folder: Path) -> None:
    (folder / "layers" / "kept" / "layer.npz").write_bytes(b"PK\x03\x04 no more")


def broken_json(folder: Path) -> None:
    (folder / "results.json").write_text("{")


def no_rank(folder: Path) -> None:
    results = tiny_results()
    del results["comparison"]["points"][2]["accuracy"]["5"]
    write_json(folder / "results.json", results)


def unlisted_layer(folder: Path) -> None:
    results = tiny_results()
    del results["layers"]["free"]
    write_json(folder / "results.json", results)


@pytest.mark.parametrize(
    ("spoil", "failure"),
    [
        (no_run, report_data.NotARun),
        (unknown_task, report_data.NotARun),
        (no_results, run_folder.RunUnfinished),
        (no_vocabulary, run_folder.RunUnfinished),
        (no_layer, run_folder.RunUnfinished),
        (broken_layer, report_data.RunUnreadable),
        (broken_json, report_data.RunUnreadable),
        (no_rank, report_data.ResultsMalformed),
        (unlisted_layer, report_data.ResultsMalformed),
    ],
)
def test_a_folder_that_cannot_be_reported_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], failure: type[DSSError]
) -> None:
    good = write_layer(tmp_path / "good", tiny_layer(), [1.0, 0.0, 0.0])
    bad = write_language_model(tmp_path / "bad")
    spoil(bad)
    result = CliRunner().invoke(
        main.cli, ["report", str(good), str(bad), "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 1
    assert re.fullmatch(r"Error: [^\n]*\.\n", result.output)
    assert not (tmp_path / "out").exists()
    with pytest.raises(failure, match=re.escape(str(bad))):
        report.gather([bad])


def test_a_layer_that_is_still_being_trained_is_unfinished(tmp_path: Path) -> None:
    run = write_layer(tmp_path / "own", tiny_layer(), [1.0, 0.0, 0.0])
    (run / run_folder.SUMMARY).unlink()
    with pytest.raises(run_folder.RunUnfinished):
        report.gather([run])


def test_a_file_is_not_overwritten_by_a_folder(tmp_path: Path) -> None:
    run = write_layer(tmp_path / "own", tiny_layer(), [1.0, 0.0, 0.0])
    (tmp_path / "out").write_text("mine")
    with pytest.raises(report.NotAFolder):
        report.write([run], tmp_path / "out", COMMAND)
    assert (tmp_path / "out").read_text() == "mine"


# --- numbers ------------------------------------------------------------------------------------


def measured(results: dict[str, Any], name: str, split: str) -> dict[str, Any]:
    return next(
        p
        for p in results["comparison"]["points"]
        if p.get("name") == name and p["split"] == split and p["dial"]["experts_searched"] == 1
    )


def headline(results: dict[str, Any], name: str) -> dict[str, Any]:
    entries = report.summary_numbers(results)["headline"]
    return next(entry for entry in entries if entry["name"] == name)


def test_the_headline_takes_the_test_split_and_one_expert() -> None:
    results = tiny_results()
    entry, tested = headline(results, "kept"), measured(results, "kept", "test")
    assert entry["accuracy"] == tested["accuracy"]
    assert entry["flops_speedup"] == tested["flops_speedup"]
    assert entry["difference"]["5"] == pytest.approx(tested["accuracy"]["5"] - 0.42)
    full = results["comparison"]["points"][1]["latency_us"]
    assert entry["published_speedup"] == 15.99
    assert report.summary_numbers(results)["full"]["latency_us"] == full
    assert entry["latency_speedup"] == full / tested["latency_us"]


@pytest.mark.parametrize("rank", ["1", "5", "10"])
def test_none_below_full_means_at_all_three_ranks(rank: str) -> None:
    results = tiny_results()
    tested = measured(results, "free", "test")
    tested["accuracy"] = dict(FULL["test"])
    assert headline(results, "free")["not_below_full"] is True
    tested["accuracy"][rank] -= 1e-6
    assert headline(results, "free")["not_below_full"] is False


def test_tables_name_what_was_not_measured() -> None:
    tables = report.summary_numbers(tiny_results())["tables"]
    ours = {row["method"]: [o["title"] for o in row["ours"]] for row in tables["2"]}
    assert ours == {
        "Full": ["Full softmax"],
        "FGD-H": ["fgd 16"],
        "FGD-L": [],
        "DS-8": [],
        "DS-64": ["DS-64"],
        "DS-64*": ["DS-64*"],
    }
    assert [row["experts"] for row in tables["mitosis"]] == [2, 4, 8, 16, 32, 64]
    assert [row["ours"] is not None for row in tables["mitosis"]] == [True] * 2 + [False] * 4
    assert tables["3"] == []


def test_summary_is_json_and_makes_a_markdown_table(tmp_path: Path) -> None:
    run = write_language_model(tmp_path / "run")
    numbers = tmp_path / "numbers.json"
    arguments = ["report", str(run), "--markdown", "--numbers", str(numbers)]
    result = CliRunner().invoke(main.cli, arguments)
    assert result.exit_code == 0, result.output
    (summary,) = json.loads(numbers.read_text())["runs"]
    assert result.output == report.markdown([summary]) + "\n"
    table = [line for line in result.output.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert len(table) == 2 + 2 + 4
    for entry in summary["headline"]:
        assert any(
            entry["title"] in line and f"{entry['flops_speedup']:.2f}x" in line for line in table
        )
    assert "3 in kept" in result.output


def test_without_a_comparison_there_is_no_table(tmp_path: Path) -> None:
    run = write_layer(tmp_path / "own", tiny_layer(), [1.0, 0.0, 0.0])
    result = CliRunner().invoke(main.cli, ["report", str(run), "--markdown"])
    assert result.exit_code == 1
    assert result.output.startswith("Error: None of these runs compares methods")


def test_the_papers_tables_agree_with_each_other() -> None:
    for corpus in ("ptb", "wikitext"):
        device = {row.method: row for row in paper_tables.DEVICE[corpus]}
        words = {row.method: row for row in paper_tables.LANGUAGE_MODELS[corpus]}
        assert device["DS-64"].flops_speedup == words["DS-64"].flops_speedup
        assert device["Full"].accuracy["1"] == words["Full"].accuracy["1"]
        for row in words.values():
            assert sorted(row.accuracy.values()) == list(row.accuracy.values())
    assert paper_tables.speedup("wikitext", "D64+S50") == 32.77
    assert paper_tables.speedup("ptb", None) is None


# --- figures ------------------------------------------------------------------------------------

costs = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


@given(costs, st.booleans())
def test_the_frontier_is_what_nothing_beats(pairs: list[tuple[int, int]], more: bool) -> None:
    points = [trade_off.Measured("svd", c, {"1": a / 10}) for c, a in pairs]

    def beats(one: trade_off.Measured, other: trade_off.Measured) -> bool:
        cheaper = one.cost >= other.cost if more else one.cost <= other.cost
        return cheaper and one.accuracy["1"] >= other.accuracy["1"] and one != other

    kept = trade_off.frontier(points, "1", more_is_better=more)
    assert {(p.cost, p.accuracy["1"]) for p in kept} == {
        (p.cost, p.accuracy["1"]) for p in points if not any(beats(q, p) for q in points)
    }
    assert [p.cost for p in kept] == sorted(p.cost for p in kept)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 64)), min_size=1, max_size=50))
def test_redundancy_counts_each_word_that_can_be_shown(pairs: list[tuple[int, int]]) -> None:
    frequencies, copies = np.array(pairs, np.int64).T
    counted = layer_figures.redundancy(frequencies, copies)
    shown = (frequencies > 0) & (copies > 0)
    assert counted.words.sum() == shown.sum()
    total = np.nansum(counted.mean_copies * counted.words.sum(1))
    assert total == pytest.approx(copies[shown].sum())


def test_a_large_vocabulary_is_drawn_in_columns() -> None:
    rng = np.random.default_rng(0)
    layer = report_data.LayerFacts(
        "large",
        rng.random((64, 33_278)) < 0.02,
        np.full(64, 1 / 64),
        rng.integers(1, 1000, 33_278),
        None,
    )
    assert layer_figures.expert_matrix(layer).startswith(b"\x89PNG")
