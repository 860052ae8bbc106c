"""The comparison's tables, always rendered from its JSON, between two marks of a document."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.document import table, write_part


def update(document: Path, results: Mapping[str, Any]) -> None:
    write_part(document, "http", render(results))


def render(results: Mapping[str, Any]) -> str:
    parts = [
        _conditions(results),
        "Requests per second, at batch / concurrency:",
        _speed_table(results),
        "Latency in microseconds, p50 / p99, at batch / concurrency:",
        _latency_table(results),
        "What each request costs, at batch 1 and concurrency 16:",
        _cost_table(results),
        "Ratios of these:",
        _ratio_table(results),
    ]
    failures = _failures(results)
    return "\n\n".join(parts + ([failures] if failures else []))


def _conditions(results: Mapping[str, Any]) -> str:
    machine, model, plan = results["machine"], results["model"], results["plan"]
    said = (
        f"Measured on {machine['cores']} cores of an {machine['cpu']} by"
        f" `{results['command']}`, {plan['rounds']} rounds of {plan['seconds']} s a point, wrk on"
        f" the same machine. {model['n_classes']:,} classes, {model['hidden_size']} hidden,"
        f" {model['n_experts']} experts ({model['classes_scored_per_row']:,.0f} classes scored for"
        f" a row), top {model['k']}; {model['bundle']} bundle."
    )
    if "precision_at_1" not in model:
        return said
    return said + " Beside a model: its precision at 1 against the full softmax."


def _model(results: Mapping[str, Any], line: str) -> str:
    """Sparse or full, and how often it names the full softmax's first class."""
    model: str = results["lines"][line]["model"]
    precision = results["model"].get("precision_at_1")
    return model if precision is None else f"{model}, {precision[model]:.3f}"


def _speed_table(results: Mapping[str, Any]) -> str:
    def cell(point: Mapping[str, Any]) -> str:
        return f"{point['requests_per_second']:,.0f}"

    return _by_place(results, cell)


def _latency_table(results: Mapping[str, Any]) -> str:
    def cell(point: Mapping[str, Any]) -> str:
        return f"{point['p50_us']:,.0f} / {point['p99_us']:,.0f}"

    return _by_place(results, cell)


def _by_place(results: Mapping[str, Any], cell: Callable[[Mapping[str, Any]], str]) -> str:
    medians = _medians(results)
    places = sorted({(batch, concurrency) for _, batch, concurrency in medians})
    rows = []
    for line, about in results["lines"].items():
        if any(key[0] == line for key in medians):
            found = [medians.get((line, *place)) for place in places]
            cells = [cell(point) if point else "errors" for point in found]
            rows.append([line, _model(results, line), about["wire"], *cells])
    heads = [f"{batch} / {concurrency}" for batch, concurrency in places]
    return table(["server", "model", "body", *heads], rows)


def _cost_table(results: Mapping[str, Any]) -> str:
    rows = []
    for (line, batch, concurrency), point in _medians(results).items():
        if (batch, concurrency) == (1, 16) and "requests_per_cpu_second" in point:
            rows.append(
                [
                    line,
                    f"{1e6 / point['requests_per_cpu_second']:,.0f} us",
                    f"{point['server_cpu_seconds'] / point['seconds']:.2f}",
                    f"{point['wrk_cpu_seconds'] / point['seconds']:.2f}",
                    f"{point['pss_bytes'] / 2**20:,.0f} MB",
                    f"{point['processes']:.0f}",
                ]
            )
    heads = ["server", "CPU time of a request", "cores used", "by wrk", "memory", "processes"]
    return table(heads, rows)


def _ratio_table(results: Mapping[str, Any]) -> str:
    rows = []
    for ratio in results["ratios"]:
        value = "not measured" if ratio["value"] is None else f"{ratio['value']:.2f}"
        reached = {True: "yes", False: "no", None: ""}[ratio["reached"]]
        rows.append([ratio["name"], value, _bound(ratio), reached, _against(results, ratio)])
    return table(["ratio", "measured", "to reach", "reached", "against"], rows)


def _against(results: Mapping[str, Any], ratio: Mapping[str, Any]) -> str:
    """The line that decided; where it serves another model than ours, both models' precision."""
    line = ratio["against"].partition(", batch ")[0]
    precision = results["model"].get("precision_at_1")
    if precision is None or results["lines"].get(line, {}).get("model") != "full":
        return str(ratio["against"])
    return f"{ratio['against']}; precision {precision['full']:.3f} / {precision['sparse']:.3f}"


def _bound(ratio: Mapping[str, Any]) -> str:
    if ratio["at_least"] is not None:
        return f"at least {ratio['at_least']:g}"
    return "" if ratio["at_most"] is None else f"at most {ratio['at_most']:g}"


def _failures(results: Mapping[str, Any]) -> str:
    """What could not be measured, and why; nothing if all could."""
    said = [f"- {line}: {reason}" for line, reason in results["failures"].items()]
    for point in results["points"]:
        if point["errors"]:
            place = f"batch {point['batch']}, concurrency {point['concurrency']}"
            errors = ", ".join(f"{count} {kind}" for kind, count in point["errors"].items())
            said.append(f"- {point['line']}, {place}: errors in round {point['round']} ({errors})")
    return "\n".join(["Not measured:", "", *said]) if said else ""


def _medians(results: Mapping[str, Any]) -> dict[tuple[str, int, int], Mapping[str, Any]]:
    return {(m["line"], m["batch"], m["concurrency"]): m for m in results["medians"]}
