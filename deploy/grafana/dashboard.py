"""The Grafana dashboard as code: `make dashboard` rewrites dashboards/doubly-sparse-softmax.json.

Panels flow from left to right on Grafana's 24 columns, in the order of sections.py. What an
operator keeps open comes first.
"""

import json
from pathlib import Path

from deploy.grafana import queries as q
from deploy.grafana import sections
from deploy.grafana.panels import Json, annotation, label_variable, place, row

OUTPUT = Path(__file__).parent / "dashboards" / "doubly-sparse-softmax.json"


def build() -> Json:
    panels = [
        *sections.overview(),
        *sections.traffic(),
        *sections.experts(),
        row("Drift"),
        *sections.drift(),
        row("Promises"),
        *sections.promises(),
        row("Engine and objective"),
        *sections.engine(),
        row("Each expert's share"),
        *sections.each_expert(),
        row("Versions and processes"),
        *sections.versions(),
        *sections.processes(),
    ]
    return {
        "uid": "doubly-sparse-softmax",
        "title": "Doubly sparse softmax",
        "tags": ["doubly-sparse-softmax"],
        "schemaVersion": 41,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {
            "list": [
                annotation("Versions loaded", q.VERSION_LOADED, "version {{version}}", "blue"),
                annotation("Labels moved", q.LABEL_MOVED, "label {{label}}", "purple"),
                annotation("Alerts", q.ALERT_FIRES, "{{alertname}}", "red"),
            ]
        },
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {"text": "Prometheus", "value": "prometheus"},
                },
                label_variable("model", "label_values(dss_model_info, model)"),
                label_variable(
                    "version",
                    'label_values(dss_model_info{model="$model"}, version)',
                    includeAll=True,
                    allValue=".+",
                    current={"text": "All", "value": "$__all"},
                ),
            ]
        },
        "panels": place(panels),
    }


def text() -> str:
    return json.dumps(build(), indent=2) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(text(), encoding="utf-8")
