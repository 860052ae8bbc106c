"""The dashboard and the rules: made by their code, and asking for metrics that there are."""

import re
import shutil

import pytest
from helpers.commands import run
from helpers.deployment.monitoring import (
    ALERTS,
    ANNOTATIONS,
    DASHBOARD,
    DASHBOARD_FILE,
    DATASOURCE,
    PANELS,
    PROMETHEUS,
    QUERIES,
    RECORDED,
    RULES,
    families,
    read_yaml,
    without_threshold,
)
from helpers.paths import ROOT

from deploy.grafana import dashboard

# --- the dashboard ---------------------------------------------------------------------------


def test_the_committed_dashboard_is_the_one_its_code_makes() -> None:
    assert DASHBOARD_FILE.read_text() == dashboard.text(), "run make dashboard"


def test_panels_have_ids_and_titles_of_their_own_and_do_not_overlap() -> None:
    for key in "id", "title":
        values = [panel[key] for panel in DASHBOARD["panels"]]
        assert len(set(values)) == len(values)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_panels_ask_the_provisioned_data_source() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["current"]["value"] == DATASOURCE["uid"]
    for panel in PANELS:
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}


# --- dashboard and rules ask for what there is -----------------------------------------------


def sample_names() -> set[str]:
    """What a scrape can show: a histogram is shown as three."""
    parts = {"histogram": ["_bucket", "_sum", "_count"]}
    return {
        name + part for name, family in families().items() for part in parts.get(family.type, [""])
    }


def metrics_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:dss_|dss:|process_)[a-z0-9_:]+", query))


def test_every_metric_asked_for_is_one_the_service_or_a_rule_makes() -> None:
    known = sample_names() | {*RECORDED}
    rules = {rule.get("alert") or rule["record"]: rule["expr"] for rule in RULES}
    variables = {
        variable["name"]: variable["definition"]
        for variable in DASHBOARD["templating"]["list"]
        if variable["type"] == "query"
    }
    for name, query in {**QUERIES, **ANNOTATIONS, **rules, **variables}.items():
        assert metrics_in(query) <= known, name
    assert len(set.union(*map(metrics_in, QUERIES.values()))) > 15, "the names are not recognised"


def test_every_alert_is_seen_firing_by_its_rule_test() -> None:
    fired = {
        check["alertname"]
        for case in read_yaml(PROMETHEUS / "rules_test.yml")["tests"]
        for check in case["alert_rule_test"]
        if check["exp_alerts"]
    }
    assert fired == {*ALERTS}


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_is_wrong_what_to_do_and_where_more_is_written(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in {"critical", "warning"}
    assert set(alert["annotations"]) == {"summary", "action", "docs"}
    file, anchor = alert["annotations"]["docs"].split("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / file).read_text(), flags=re.M)
    assert anchor == name.lower()
    assert name in headings


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_compares_recorded_series_or_gauges(name: str) -> None:
    """So that a graph of what it watches can be drawn, and its distance from firing seen."""
    assert without_threshold(name) != ALERTS[name]["expr"]
    assert not re.search(r"rate\(|increase\(|_over_time\(|sum |[<>]", without_threshold(name))


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)


@needs_promtool
def test_promtool_accepts_the_configuration_and_the_rules_pass_their_tests() -> None:
    run("promtool", "check", "config", "prometheus.yml", cwd=PROMETHEUS)
    run("promtool", "test", "rules", "rules_test.yml", cwd=PROMETHEUS)
