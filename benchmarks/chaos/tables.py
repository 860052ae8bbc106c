"""The scenarios' tables, always rendered from their JSON, between two marks of a document."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import document

MIB = 2**20


def update(path: Path, results: Mapping[str, Any]) -> None:
    document.write_part(path, "chaos", render(results))


def render(results: Mapping[str, Any]) -> str:
    found = results["scenarios"]
    machine = results["machine"]
    attacks = _attacks(found)
    return "\n\n".join(
        [
            f"Measured on {machine['cores']} cores of an {machine['cpu']}, which the load generator"
            f" shares, by `{results['command']}`.",
            _counts(found),
            *(["Attacks beside ordinary traffic:", attacks] if attacks else []),
            "Every criterion:",
            _criteria(found),
            "Further facts:",
            _facts(found),
        ]
    )


def _counts(found: Mapping[str, Any]) -> str:
    heads = [
        "scenario", "holds", "sent", "answered", "refused", "rejected", "failed", "wrong", "lost",
        "memory, start / end", "descriptors", "p50 / p99", "took",
    ]  # fmt: skip
    rows = []
    for figures in found.values():
        if figures["not_run"]:
            rows.append([figures["title"], "not run", *[""] * (len(heads) - 2)])
            continue
        rows.append(
            [
                figures["title"],
                "yes" if figures["passed"] else "**no**",
                *(
                    f"{figures[name]:,}" if figures["sent"] else ""
                    for name in ("sent", "answered", "refused", "rejected")
                ),
                _by_kind(figures["failed"]),
                f"{figures['wrong']:,}",
                f"{figures['lost']:,}",
                _pair(figures["rss_start"], figures["rss_end"], MIB, " MB"),
                _pair(figures["fds_start"], figures["fds_end"], 1, ""),
                _latencies(figures),
                f"{figures['seconds']:,.0f} s",
            ]
        )
    return _table(heads, rows)


def _attacks(found: Mapping[str, Any]) -> str:
    """One row for each attack and number of connections; nothing before any has run."""
    heads = [
        "scenario", "attack", "connections", "p99 without", "beside ordinary requests",
        "beside the attack", "ratio", "tries", "answered", "429", "failed", "lost", "wrong",
        "above idle", "workers lost", "/livez late", "attackers got",
    ]  # fmt: skip
    rows = [
        [
            figures["title"],
            point["attack"],
            f"{point['connections']}",
            _milliseconds(point["p99_without_ms"]),
            _milliseconds(point["p99_harmless_ms"]),
            _milliseconds(point["p99_ms"]),
            "none" if point["ratio"] is None else f"{point['ratio']:.2f}",
            f"{point['tries']}",
            f"{point['goodput']:.0%}",
            f"{point['rejected']:,}",
            _by_kind(point["failed"]),
            f"{point['lost']:,}",
            f"{point['wrong']:,}",
            f"{point['memory'] / MIB:,.0f} MB",
            f"{point['workers_lost']}",
            f"{point['livez_late']}",
            _by_kind(point["attackers_got"]),
        ]
        for figures in found.values()
        for point in figures.get("attacks", ())
    ]
    return _table(heads, rows) if rows else ""


def _criteria(found: Mapping[str, Any]) -> str:
    rows = []
    for figures in found.values():
        if figures["not_run"]:
            rows.append([figures["title"], "", "not run", figures["not_run"]])
        for criterion in figures["criteria"]:
            holds = "yes" if criterion["passed"] else "**no**"
            rows.append([figures["title"], criterion["words"], holds, criterion["found"]])
    return _table(["scenario", "criterion", "holds", "found"], rows)


def _facts(found: Mapping[str, Any]) -> str:
    rows = [
        [figures["title"], name, _number(value)]
        for figures in found.values()
        for name, value in figures["facts"].items()
    ]
    return _table(["scenario", "fact", "value"], rows)


def _pair(start: float | None, end: float | None, unit: int, name: str) -> str:
    if start is None or end is None:
        return ""
    return f"{start / unit:,.0f} / {end / unit:,.0f}{name}"


def _latencies(figures: Mapping[str, Any]) -> str:
    if figures["p50_ms"] is None:
        return ""
    return f"{figures['p50_ms']:.1f} / {figures['p99_ms']:.1f} ms"


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _by_kind(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items()) or "0"


def _milliseconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f} ms"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return document.table(heads, [[cell.replace("|", "\\|") for cell in row] for row in rows])
