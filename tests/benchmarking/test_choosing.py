"""The grid of K and budgets: what is drawn and written of it."""

import json
from pathlib import Path

from helpers.paths import ROOT

from benchmarks.training.choosing import DOCUMENT, DROPPING, KEEP_ONE, RESULTS, plan
from benchmarks.training.choosing_report import draw, gain, markdown, trained

RUN = json.loads((ROOT / RESULTS).read_text())


def test_the_document_shows_what_was_measured() -> None:
    assert markdown(RUN, "images/choosing.svg") in (ROOT / DOCUMENT).read_text()


def test_every_layer_of_the_grid_was_measured() -> None:
    asked = [(p["n_experts"], p["speedup"], p["keep_one"]) for p in RUN["points"]]
    planned = plan(KEEP_ONE, keep_one=True) | plan(DROPPING, keep_one=False)
    settings = [layer.config() for layer in planned.values()]
    assert asked == [(each.n_experts, each.speedup, each.keep_one) for each in settings]


def test_impossible_layers_are_said_and_not_drawn(tmp_path: Path) -> None:
    none = {"n_experts": 8, "speedup": 60.0, "keep_one": True, "impossible": "No layer."}
    run = RUN | {"points": [none, *RUN["points"]]}
    assert "| 8 | 60x | yes | there is no such layer |" in markdown(run, "some.svg")
    assert none not in trained(run["points"], keep_one=True)
    draw(run, tmp_path / "some.svg")
    assert (tmp_path / "some.svg").stat().st_size > 1000


def test_gains_are_in_points() -> None:
    point = {"accuracy_at": {"10": 0.505}, "full_accuracy_at": {"10": 0.5}}
    assert round(gain(point), 6) == 0.5
