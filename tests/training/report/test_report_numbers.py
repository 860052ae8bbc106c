"""The headline and the tables of a report."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers.training.report_runs import (
    FULL,
    tiny_layer,
    tiny_results,
    write_language_model,
    write_layer,
)

from service.cli import main
from trainer.report import paper_tables, report


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
