"""From a text to the tables: layers of a plan, exported and compared, in one results.json."""

import json
from pathlib import Path

import pytest
from helpers.dss_process import dss
from helpers.training.tiny_corpus import write_corpus

from trainer.data import run_folder
from trainer.tasks.language_model import tables
from trainer.tasks.language_model.plan import PlanInvalid, read_plan

PLAN = """
[ds-2]
title = "DS-2"
paper = "DS-2"
settings = { n_experts = 2, rows = 15, batch_size = 50 }

[ds-2-free]
title = "DS-2*"
settings = { n_experts = 2, rows = 14, batch_size = 50, keep_one = false }

[grown]
title = "DS-2, mitosis"
settings = { method = "mitosis", n_experts = 2, rows = 15, batch_size = 50, distil = 0 }

[d2-s10]
title = "D2 + S10"
paper = "D2+S10"
of = "ds-2"
svd = { window = 3, share = 0.9, above = 5 }
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    (folder / "plan.toml").write_text(PLAN)
    layers = dss(*command(folder), "--until", "layers")
    assert layers.returncode == 0, layers.stderr
    assert "DS-2, mitosis" in layers.stdout
    assert (folder / "run" / tables.BUNDLES / "d2-s10").exists()
    assert not (folder / "run" / tables.COMPARISON).exists()  # so no test word was read for them
    done = dss(*command(folder), "--resume")
    assert done.returncode == 0, done.stderr
    return folder / "run"


def command(folder: Path) -> list[object]:
    data = folder / "corpus" if (folder / "corpus").exists() else write_corpus(folder / "corpus")
    small = ("--epochs", 12, "--set", "units=12", "--set", "streams=3", "--set", "threads=1")
    quick = ("--methods", "full,svd", "--no-latency", "--set", "learning_rate=0.02")
    given = ("--data", data, "--out", folder / "run", "--plan", folder / "plan.toml")
    return ["task", "language-model", *given, *small, *quick]


def test_results_hold_every_layer_on_both_splits(run: Path) -> None:
    results = json.loads((run / run_folder.RESULTS).read_text())
    assert results["task"] == "language-model" and results["corpus"] == "ptb"
    assert list(results["layers"]) == ["ds-2", "ds-2-free", "grown", "d2-s10"]
    assert results["layers"]["ds-2"]["keep_one"] and not results["layers"]["ds-2-free"]["keep_one"]
    assert results["layers"]["d2-s10"]["svd"] == {"window": 3, "share": 0.9, "above": 5}
    points = [point for point in results["comparison"]["points"] if point["method"] == "ds"]
    tested = {point["name"] for point in points if point["split"] == "test"}
    assert tested == set(results["layers"])
    assert results["mitosis"]["layer"] == "grown"
    assert [stage["experts"] for stage in results["mitosis"]["stages"]] == [2]
    assert results["comparison"]["full"]["test"] == results["encoder"]["test"]["accuracy"]


def test_the_page_is_written_beside_them(run: Path) -> None:
    page = (run / "report" / "report.html").read_text()
    assert "DS-2, mitosis" in page and "D2 + S10" in page


def test_what_is_finished_is_not_done_again(run: Path) -> None:
    before = {
        path: path.stat().st_mtime_ns
        for name in ("layers", "bundles")
        for path in (run / name).rglob("*")
        if path.is_file()
    }
    results = (run / run_folder.RESULTS).read_text()
    done = dss(*command(run.parent), "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"run": str(run), **json.loads(results)}
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert (run / run_folder.RESULTS).read_text() == results


def test_an_empty_plan_trains_nothing(run: Path) -> None:
    empty = run.parent / "empty.toml"
    empty.write_text("")
    done = dss(*command(run.parent), "--resume", "--until", "layers", "--plan", empty)
    assert done.returncode == 0, done.stderr
    assert "DS-2" not in done.stdout


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[a]\npaper = 'DS-2'", "is wrong at a.title: Field required."),
        ("[a]\ntitle = 'A'\nof = 'b'", "a is made of 'b', which is not trained."),
        ("[a]\ntitle = 'A'\nsettings = { n_expert = 2 }", "no training setting 'n_expert'"),
        ("[a]\ntitle = 'A'\n[b]\ntitle = 'B'\nof = 'a'\nsettings = { seed = 1 }", "no settings"),
    ],
)
def test_a_wrong_plan_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(Exception, match=sentence):
        read_plan(tmp_path / "plan.toml")


def test_the_presets_can_be_read() -> None:
    for corpus in ("ptb", "wikitext"):
        assert {"DS-2", "DS-8", "DS-64", "DS-64*"} <= {
            layer.paper for layer in read_plan(tables.preset(corpus)).values()
        }


def test_an_svd_needs_its_share(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("[a]\ntitle = 'A'\nsvd = { window = 3 }")
    with pytest.raises(PlanInvalid, match=r"a\.svd\.share"):
        read_plan(tmp_path / "plan.toml")
