"""The Grafana dashboard as code: run this file to rewrite dashboards/doubly-sparse-softmax.json.

Panels flow from left to right on Grafana's 24 columns, in the order in which they stand here.
"""

import json
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parent / "dashboards" / "doubly-sparse-softmax.json"
COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
MODEL = 'model="$model", version=~"$version"'
TOPK = 'route=~".*topk"'

Json = dict[str, Any]


# --- queries ---------------------------------------------------------------------------------


def rate(metric: str, labels: str = MODEL) -> str:
    return f"rate({metric}{{{labels}}}[$__rate_interval])"


def quantile(q: float, histogram: str, labels: str = MODEL, by: str = "le") -> str:
    return f"histogram_quantile({q}, sum by ({by}) ({rate(f'{histogram}_bucket', labels)}))"


def padded(query: str) -> str:
    """Expert numbers with three digits: Prometheus orders series by their labels as text."""
    one_digit = f'label_replace({query}, "expert", "00$1", "expert", "(.)")'
    return f'label_replace({one_digit}, "expert", "0$1", "expert", "(..)")'


REQUESTS = f"sum({rate('dss_requests_total')})"
ROWS = f"sum({rate('dss_rows_total')})"
EXECUTIONS = f"sum({rate('dss_executions_total')})"
# The model is empty when a request named none that exists.
REJECTED = rate("dss_rejected_requests_total", 'model=~"$model|"')
ALL_REJECTED = f"(sum({REJECTED}) or vector(0))"
LIVE_SPEEDUP = f"dss_flops_speedup_ratio{{{MODEL}}}"
RECENT_SPEEDUP = f"dss:flops_speedup:ratio5m{{{MODEL}}}"
TRAINED_SPEEDUP = f"dss_trained_flops_speedup_ratio{{{MODEL}}}"
LIVE_UTILIZATION = padded(
    f"sum by (expert) ({rate('dss_expert_rows_total')}) / on () group_left () {ROWS}"
)
TRAINED_UTILIZATION = padded(f"avg by (expert) (dss_trained_expert_utilization_ratio{{{MODEL}}})")
EXPERT_MEAN_SECONDS = padded(
    f"sum by (expert) ({rate('dss_expert_compute_seconds_sum')})"
    f" / sum by (expert) ({rate('dss_expert_compute_seconds_count')})"
)


# --- panels ----------------------------------------------------------------------------------


def panel(
    kind: str,
    title: str,
    text: str,
    queries: dict[str, str],
    *,
    width: int,
    height: int,
    unit: str = "short",
    options: Json | None = None,
    custom: Json | None = None,
    defaults: Json | None = None,
    table: bool = False,
    **rest: Any,
) -> Json:
    """`queries` maps a series' name, or the label it is named by, to PromQL."""
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": DATASOURCE,
            "expr": query,
            "legendFormat": name,
            "format": "table" if table else "time_series",
            "instant": table,
            "range": not table,
        }
        for number, (name, query) in enumerate(queries.items())
    ]
    return {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": DATASOURCE,
        "gridPos": {"w": width, "h": height},
        "targets": targets,
        "options": options or {},
        "fieldConfig": {
            "defaults": {"unit": unit, "custom": custom or {}, **(defaults or {})},
            "overrides": rest.pop("overrides", []),
        },
        **rest,
    }


def stat(title: str, text: str, query: str, unit: str, **defaults: Any) -> Json:
    options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
    return panel(
        "stat",
        title,
        text,
        {title: query},
        width=3,
        height=4,
        unit=unit,
        options=options,
        defaults=defaults,
    )


def series(title: str, text: str, queries: dict[str, str], unit: str, width: int = 8) -> Json:
    return panel(
        "timeseries",
        title,
        text,
        queries,
        width=width,
        height=8,
        unit=unit,
        options={
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        custom={"fillOpacity": 8, "lineWidth": 2, "showPoints": "never"},
        defaults={"min": 0, "noValue": "none"},
    )


def row(title: str) -> Json:
    return {
        "type": "row",
        "title": title,
        "collapsed": False,
        "panels": [],
        "gridPos": {"w": COLUMNS, "h": 1},
    }


def by_expert(columns: list[str]) -> list[Json]:
    """Transformations that join table queries into one row for each expert."""
    times = ["Time", *(f"Time {number + 1}" for number in range(len(columns)))]
    names = {f"Value #{chr(ord('A') + number)}": name for number, name in enumerate(columns)}
    return [
        {"id": "joinByField", "options": {"byField": "expert", "mode": "outer"}},
        {
            "id": "organize",
            "options": {"excludeByName": dict.fromkeys(times, True), "renameByName": names},
        },
    ]


def unit_of(column: str, unit: str) -> Json:
    return {
        "matcher": {"id": "byName", "options": column},
        "properties": [{"id": "unit", "value": unit}],
    }


def steps(*colours: tuple[str, float | None]) -> Json:
    return {"mode": "absolute", "steps": [{"color": name, "value": at} for name, at in colours]}


def overview() -> list[Json]:
    return [
        stat(
            "Alerts firing",
            "Of the rules in deploy/prometheus/rules.yml.",
            'count(ALERTS{alertstate="firing"}) or vector(0)',
            "short",
            thresholds=steps(("green", None), ("red", 1)),
        ),
        stat("Requests", "Top-k requests answered.", REQUESTS, "reqps"),
        stat("Rows", "Rows answered.", ROWS, "rowsps"),
        stat(
            "p99 latency",
            "Of top-k requests, as the server sees it.",
            quantile(0.99, "dss_http_request_seconds", TOPK),
            "s",
            thresholds=steps(("green", None), ("orange", 0.05), ("red", 0.1)),
        ),
        stat(
            "Rejected",
            "Share of the top-k requests that got no answer, for whatever reason.",
            f"{ALL_REJECTED} / ({ALL_REJECTED} + {REQUESTS})",
            "percentunit",
            thresholds=steps(("green", None), ("orange", 0.001), ("red", 0.01)),
        ),
        stat(
            "Rows per execution",
            "Mean batch: what joining concurrent requests brings.",
            f"{ROWS} / {EXECUTIONS}",
            "short",
        ),
        stat(
            "FLOPs speedup now",
            "Over the last 5 minutes, by |V| / (sum |v_k| u_k + K).",
            f"avg({RECENT_SPEEDUP})",
            "suffix:x",
            decimals=1,
        ),
        stat(
            "Of the trained speedup",
            "Last 5 minutes against what training measured.",
            f"avg({RECENT_SPEEDUP} / {TRAINED_SPEEDUP})",
            "percentunit",
            thresholds=steps(("red", None), ("orange", 0.5), ("green", 0.8)),
        ),
    ]


def traffic() -> list[Json]:
    return [
        series(
            "Answers by status",
            "All routes but probes and metrics.",
            {
                "{{status}}": "sum by (status) ("
                + rate("dss_http_requests_total", 'route!~"/(livez|readyz|startupz|metrics)"')
                + ")"
            },
            "reqps",
        ),
        series(
            "Latency of top-k requests",
            "From the request's head to its answer's.",
            {
                f"p{round(q * 100)}": quantile(q, "dss_http_request_seconds", TOPK)
                for q in (0.5, 0.9, 0.99)
            },
            "s",
        ),
        series(
            "Rejected requests by reason",
            "queue_full asks for more replicas; the others are the clients' mistakes or a failure.",
            {"{{reason}}": f"sum by (reason) ({REJECTED})"},
            "reqps",
        ),
    ]


def engine() -> list[Json]:
    return [
        series(
            "Rows per execution and in the queue",
            "The batch grows with the load, and the queue once the engine cannot keep up.",
            {
                "rows per execution": f"{ROWS} / {EXECUTIONS}",
                "rows waiting": f"sum(dss_queue_rows{{{MODEL}}})",
            },
            "short",
        ),
        series(
            "Where the time goes (p99)",
            "A request waits for the engine; an engine call runs the gate, then the experts.",
            {
                "waiting": quantile(0.99, "dss_queue_seconds"),
                "engine call": quantile(0.99, "dss_compute_seconds"),
                "gate": quantile(0.99, "dss_gate_compute_seconds"),
            },
            "s",
        ),
        series(
            "CPU by instance",
            "Cores in use.",
            {"{{instance}}": rate("process_cpu_seconds_total", 'job="doubly-sparse-softmax"')},
            "short",
        ),
    ]


def experts() -> list[Json]:
    columns = {
        "classes": padded(f"avg by (expert) (dss_expert_classes{{{MODEL}}})"),
        "rows per second": padded(f"sum by (expert) ({rate('dss_expert_rows_total')})"),
        "utilization": LIVE_UTILIZATION,
        "trained utilization": TRAINED_UTILIZATION,
        "mean seconds": EXPERT_MEAN_SECONDS,
    }
    return [
        panel(
            "heatmap",
            "Expert utilization over time",
            "Rows scored by each expert per row answered. A row that goes dark is an expert the "
            "traffic has left; one bright row is a collapse.",
            {"{{expert}}": LIVE_UTILIZATION},
            width=COLUMNS,
            height=12,
            options={
                "calculate": False,
                "cellGap": 0,
                "cellValues": {"unit": "percentunit"},
                "color": {"mode": "scheme", "scheme": "Inferno", "steps": 64, "min": 0},
                "filterValues": {},
                "legend": {"show": True},
                "rowsFrame": {"layout": "auto", "value": "utilization"},
                "showValue": "never",
                "tooltip": {"mode": "single", "yHistogram": False},
                "yAxis": {"axisPlacement": "left", "axisLabel": "expert"},
            },
        ),
        panel(
            "barchart",
            "Utilization, live and trained",
            "Where the two differ, the traffic is not what the model was trained on.",
            {"live": LIVE_UTILIZATION, "trained": TRAINED_UTILIZATION},
            width=COLUMNS,
            height=8,
            unit="percentunit",
            table=True,
            options={
                "xField": "expert",
                "orientation": "vertical",
                "showValue": "never",
                "legend": {"displayMode": "list", "placement": "bottom"},
                "tooltip": {"mode": "multi"},
            },
            custom={"fillOpacity": 80},
            defaults={"min": 0},
            transformations=by_expert(["live", "trained"]),
        ),
        series(
            "FLOPs speedup",
            "By the paper's |V| / (sum |v_k| u_k + K): in the last 5 minutes, since the start, "
            "and as measured in training.",
            {
                "version {{version}}, last 5 minutes": f"avg by (version) ({RECENT_SPEEDUP})",
                "version {{version}}, since the start": f"avg by (version) ({LIVE_SPEEDUP})",
                "version {{version}}, trained": f"avg by (version) ({TRAINED_SPEEDUP})",
            },
            "suffix:x",
        ),
        series(
            "Slowest experts (p99)",
            "Of one execution of an expert; the five slowest.",
            {
                "expert {{expert}}": "topk(5, "
                + quantile(0.99, "dss_expert_compute_seconds", by="expert, le")
                + ")"
            },
            "s",
        ),
        panel(
            "table",
            "Each expert",
            "Click a column to sort by it.",
            columns,
            width=8,
            height=8,
            table=True,
            transformations=by_expert(list(columns)),
            overrides=[
                unit_of("rows per second", "rowsps"),
                unit_of("utilization", "percentunit"),
                unit_of("trained utilization", "percentunit"),
                unit_of("mean seconds", "s"),
            ],
        ),
    ]


# --- the whole -------------------------------------------------------------------------------


def place(panels: list[Json]) -> list[Json]:
    """Number the panels and lay them out: a line ends where the next panel does not fit."""
    x = y = line_height = 0
    for number, each in enumerate(panels, start=1):
        size = each["gridPos"]
        if x + size["w"] > COLUMNS:
            x, y, line_height = 0, y + line_height, 0
        each["id"] = number
        each["gridPos"] = {"x": x, "y": y, **size}
        x += size["w"]
        line_height = max(line_height, size["h"])
    return panels


def label_variable(name: str, query: str, **rest: object) -> Json:
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        **rest,
    }


def build() -> Json:
    panels = [
        *overview(),
        row("Traffic"),
        *traffic(),
        row("Engine"),
        *engine(),
        row("Experts"),
        *experts(),
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
