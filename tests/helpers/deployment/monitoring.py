"""The committed dashboard and rules, and what they ask for."""

import json
import re
from pathlib import Path
from typing import Any

from helpers.paths import ROOT
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric
from ruamel.yaml import YAML

from service.telemetry.metrics.registry import Metrics

PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"

Json = dict[str, Any]


def read_yaml(path: Path) -> Json:
    loaded: Json = YAML(typ="safe").load(path)
    return loaded


SCRAPING = read_yaml(PROMETHEUS / "prometheus.yml")
RULES = [rule for group in read_yaml(PROMETHEUS / "rules.yml")["groups"] for rule in group["rules"]]
DATASOURCE = read_yaml(GRAFANA / "provisioning" / "datasources" / "prometheus.yml")["datasources"][
    0
]
DASHBOARD_FILE = GRAFANA / "dashboards" / "doubly-sparse-softmax.json"
DASHBOARD = json.loads(DASHBOARD_FILE.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = {
    f"{panel['title']} / {target['refId']}": target["expr"]
    for panel in PANELS
    for target in panel["targets"]
}
ANNOTATIONS = {mark["name"]: mark["expr"] for mark in DASHBOARD["annotations"]["list"]}
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}


def families() -> dict[str, Metric]:
    """What the service exports, by the names that its metrics are known by."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Metrics(registry)
    return {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in registry.collect()
    }


def without_threshold(alert: str) -> str:
    """What an alert compares with numbers: it has a value whether the alert fires or not."""
    return re.sub(r"\s(<|>|==)\s[0-9.]+", "", ALERTS[alert]["expr"])
