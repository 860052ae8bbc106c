"""What docs/monitoring.md says is there, and the dashboard as a picture."""

import io
import json
import re

import httpx
import numpy as np
import pytest
from helpers.deployment.monitoring import ALERTS, DASHBOARD, PANELS, families
from helpers.paths import ROOT
from numpy.typing import NDArray
from PIL import Image

from deploy.grafana.prometheus import Prometheus, Series
from deploy.pictures.dashboard import render
from deploy.pictures.dashboard.units import UnitUnknown, written

DOCS = (ROOT / "docs" / "monitoring.md").read_text()

# --- the page ----------------------------------------------------------------------------------


def described() -> dict[str, tuple[str, set[str]]]:
    """The page's metrics with their types and labels."""
    found = {}
    row = r"^\| `(\w+)` \| (counter|gauge|histogram)[^|]* \|([^|]*)\|"
    for name, kind, labels in re.findall(row, DOCS, flags=re.M):
        assert name not in found, f"{name} stands there twice"
        found[name] = kind, set(re.findall(r"`(\w+)`", labels))
    return found


def test_the_page_describes_exactly_the_metrics_that_there_are() -> None:
    exported = {name: family.type for name, family in families().items()}
    page = {name: kind for name, (kind, _) in described().items()}
    assert page == exported


def test_the_page_names_the_labels_that_a_server_shows(http: httpx.Client) -> None:
    http.post("/topk", json={"inputs": [[1.0]], "k": 1})
    seen: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(\w+)\{(.*)\} ", http.get("/metrics").text, flags=re.M):
        base = re.sub(r"_(bucket|count|sum)$", "", name)
        seen.setdefault(base, set()).update(set(re.findall(r'(\w+)="', labels)) - {"le"})
    assert len(seen) > 15
    for name, labels in seen.items():
        assert described()[name][1] == labels, name


def test_each_alert_has_its_own_heading_and_nothing_else_has() -> None:
    (alerts,) = re.findall(r"^## Alerts\n(.*)", DOCS, flags=re.M | re.S)
    assert re.findall(r"^### (.+)$", alerts, flags=re.M) == list(ALERTS)


def test_links_inside_the_page_lead_somewhere() -> None:
    headings = {h.lower().replace(" ", "-") for h in re.findall(r"^#+ (.+)$", DOCS, flags=re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", DOCS)) <= headings


# --- the picture -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, "s", "0 s"),
        (0.00314, "s", "3.14 ms"),
        (0.000024, "s", "24 µs"),
        (1.5, "s", "1.5 s"),
        (0.0123, "percentunit", "1.23%"),
        (141.4, "reqps", "141 req/s"),
        (25_300.0, "rowsps", "25.3 K rows/s"),
        (50.0, "suffix:x", "50x"),
        (229 * 2.0**20, "bytes", "229 MiB"),
        (1_250_000.0, "short", "1.25 Mil"),
    ],
)
def test_numbers_are_written_as_grafana_does(value: float, unit: str, text: str) -> None:
    assert written(value, unit) == text


def test_a_unit_that_the_dashboard_has_and_the_picture_does_not_is_noticed() -> None:
    with pytest.raises(UnitUnknown):
        written(1.0, "parsecs")
    for panel in PANELS:
        written(1.0, panel["fieldConfig"]["defaults"]["unit"])


class Canned:
    """Answers every query with the same two experts or versions, and one with nothing."""

    times: NDArray[np.float64] = 1_000_000.0 + np.arange(30.0)
    empty = next(p["targets"][0]["expr"] for p in PANELS if p["title"] == "Drift (PSI)")

    def over_time(self, query: str) -> list[Series]:
        values = 0.25 + 0.01 * np.arange(len(self.times))
        values[:5] = np.nan
        return [] if query == self.empty else [Series(labels(n), (n + 1) * values) for n in (0, 1)]

    def at_end(self, query: str) -> list[Series]:
        return [Series(series.labels, series.values[-1:]) for series in self.over_time(query)]


def labels(number: int) -> dict[str, str]:
    names = "status", "reason", "instance", "label", "alertname"
    return {"expert": f"00{number}", "version": str(number)} | {n: f"{n}-{number}" for n in names}


def test_the_picture_has_every_panel_with_its_numbers_and_says_where_there_is_none() -> None:
    canvas = render.drawn(DASHBOARD, Canned(), {"model": "demo"})
    texts = [text.get_text() for axes in canvas.figure.axes for text in axes.texts]
    for panel in PANELS:
        assert texts.count(panel["title"]) == 1
    assert texts.count("No data") == 1, "one query was answered with nothing"
    assert "540 ms" in texts, "the last p99"
    assert "0.5x" in texts, "the last speedup, with the decimals that its panel asks for"
    assert {"status-0", "reason-1", "version 1, trained", "model: demo"} <= {*texts}

    picture = Image.open(io.BytesIO(render.png(canvas)))
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in PANELS)
    assert picture.size == (1680, 46 + 38 * rows + 8)


def test_prometheus_is_asked_with_variables_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, str]]] = []

    def get(url: str, params: dict[str, str], timeout: float) -> httpx.Response:
        assert timeout > 0
        asked.append((url, params))
        point = {"metric": {"expert": "7"}, "value": [110, "3"], "values": [[102, "1"], [106, "2"]]}
        answer = {"data": {"result": [point]}}
        return httpx.Response(200, content=json.dumps(answer), request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)
    variables = {"$model": "demo", "$__rate_interval": "4s"}
    asking = Prometheus("http://127.0.0.1:9", 100.0, 110.0, 2.0, variables)
    (series,) = asking.over_time('rate(rows{model="$model"}[$__rate_interval])')
    np.testing.assert_array_equal(series.values, [np.nan, 1, np.nan, 2, np.nan, np.nan])
    assert (series.last, series.name("expert {{expert}}")) == (2.0, "expert 7")
    assert asking.at_end("up")[0].last == 3.0
    assert asked[0][0] == "http://127.0.0.1:9/api/v1/query_range"
    assert asked[0][1]["query"] == 'rate(rows{model="demo"}[4s])'
    assert asked[1][1] == {"query": "up", "time": "110.0"}
