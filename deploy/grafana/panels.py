"""Grafana's panels as JSON: the kinds that the dashboard has, and how they are laid out."""

from typing import Any

COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

Json = dict[str, Any]


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
            "refId": letter(number),
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


def letter(number: int) -> str:
    return chr(ord("A") + number)


def steps(*colours: tuple[str, float | None]) -> Json:
    """From which value on a colour holds; the first holds below all."""
    return {"mode": "absolute", "steps": [{"color": name, "value": at} for name, at in colours]}


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


def series(
    title: str,
    text: str,
    queries: dict[str, str],
    unit: str,
    *,
    width: int = 8,
    height: int = 7,
    lines: Json | None = None,
    at_least: float | None = None,
    stacked: bool = False,
    **defaults: Any,
) -> Json:
    """`lines` are thresholds, drawn across the graph, which reaches `at_least` so high."""
    custom: Json = {"fillOpacity": 8, "lineWidth": 2, "showPoints": "never"}
    if lines:
        custom["thresholdsStyle"] = {"mode": "dashed"}
        defaults["thresholds"] = lines
    if at_least is not None:
        custom["axisSoftMax"] = at_least
    if stacked:
        custom |= {"stacking": {"mode": "normal"}, "fillOpacity": 40, "lineWidth": 1}
    return panel(
        "timeseries",
        title,
        text,
        queries,
        width=width,
        height=height,
        unit=unit,
        options={
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        custom=custom,
        defaults={"min": 0, "noValue": "none", **defaults},
    )


def table(
    title: str,
    text: str,
    by: str,
    columns: dict[str, str],
    *,
    width: int,
    height: int,
    units: dict[str, str] | None = None,
) -> Json:
    """One row for each value of the label `by`; `columns` maps names to queries."""
    return panel(
        "table",
        title,
        text,
        columns,
        width=width,
        height=height,
        table=True,
        transformations=joined(by, list(columns)),
        overrides=[unit_of(column, unit) for column, unit in (units or {}).items()],
    )


def joined(by: str, columns: list[str]) -> list[Json]:
    """Transformations that join table queries into one row for each value of a label."""
    times = ["Time", *(f"Time {number + 1}" for number in range(len(columns)))]
    # Grafana names a lone query's value without its letter.
    names = {"Value": columns[0]} if len(columns) == 1 else {}
    names |= {f"Value #{letter(number)}": name for number, name in enumerate(columns)}
    return [
        {"id": "joinByField", "options": {"byField": by, "mode": "outer"}},
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


def row(title: str) -> Json:
    return {
        "type": "row",
        "title": title,
        "collapsed": False,
        "panels": [],
        "gridPos": {"w": COLUMNS, "h": 1},
    }


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


def annotation(name: str, query: str, title: str, colour: str) -> Json:
    """Marks on every graph where the query has a value."""
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": colour,
        "expr": query,
        "step": "10s",
        "titleFormat": title,
    }
