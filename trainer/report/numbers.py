"""The numbers of a report: the headline and the paper's tables beside ours, as plain JSON.

Page, README and benchmarks/results all take their numbers from here.
"""

from collections.abc import Iterable
from typing import Any

from trainer.report import paper_tables
from trainer.report.paper_tables import Published
from trainer.report.runs import RANKS, Comparison, Layer, Point, Results, parse_results

CONTROL = "full-retrained"
FULL = "full"
CORPORA = {"ptb": "Penn Treebank", "wikitext": "WikiText-2"}


def summary_numbers(results: dict[str, Any] | Results) -> dict[str, Any]:
    """Headline and tables of one language-model run, from what its results.json holds."""
    if not isinstance(results, Results):
        results = parse_results(results)
    comparison, corpus = results.comparison, results.corpus
    return {
        "corpus": corpus,
        "n_classes": comparison.n_classes,
        "hidden_size": comparison.hidden_size,
        "rows": comparison.rows,
        "machine": comparison.machine,
        "encoder": results.encoder,
        "full": {
            "accuracy": comparison.full,
            "latency_us": _latency(_best(of_method(comparison, FULL))),
        },
        "control": _control(comparison),
        "headline": [
            entry
            for name, layer in results.layers.items()
            if (entry := _headline(results, name, layer)) is not None
        ],
        "tables": {
            "1": _beside(results, paper_tables.DEVICE.get(corpus, ())),
            "2": _beside(results, paper_tables.LANGUAGE_MODELS.get(corpus, ())),
            "3": _beside(results, paper_tables.SVD_INSIDE.get(corpus, ())),
            "mitosis": _mitosis_stages(results),
        },
        "mitosis": None
        if results.mitosis is None
        else {
            "layer": results.layers[results.mitosis.layer].title
            if results.mitosis.layer in results.layers
            else results.mitosis.layer,
            "peak_memory": results.mitosis.peak_memory,
            "published_peak_memory": paper_tables.MITOSIS_PEAK_MEMORY.get(corpus),
        },
        "skipped": [skipped.model_dump() for skipped in comparison.skipped],
    }


def of_method(comparison: Comparison, method: str) -> list[Point]:
    return [point for point in comparison.measured if point.method == method]


def _best(points: Iterable[Point]) -> Point | None:
    """The one to report: on test rows if there are any, the cheapest search, a chosen one first."""
    return min(
        points,
        key=lambda p: (p.split != "test", p.dial.get("experts_searched", 1), not p.chosen),
        default=None,
    )


def _latency(point: Point | None) -> float | None:
    return None if point is None else point.latency_us


def _control(comparison: Comparison) -> dict[str, Any] | None:
    point = _best(of_method(comparison, CONTROL))
    if point is None:
        return None
    return {
        **_measured(point, "Full softmax, trained on"),
        "valid": next(
            (p.accuracy for p in of_method(comparison, CONTROL) if p.split == "valid"), None
        ),
        "train_seconds": point.train_seconds,
    }


def _headline(results: Results, name: str, layer: Layer) -> dict[str, Any] | None:
    comparison = results.comparison
    point = _best(p for p in of_method(comparison, "ds") if p.name == name)
    if point is None:
        return None
    full = comparison.full.get(point.split)
    control = _best(p for p in of_method(comparison, CONTROL) if p.split == point.split)
    full_latency = _latency(_best(of_method(comparison, FULL)))
    return {
        "name": name,
        "kind": layer.kind,
        "n_experts": layer.n_experts,
        "keep_one": layer.keep_one,
        "method": layer.method,
        "speedup_asked": layer.speedup_asked,
        "svd": layer.svd,
        **_measured(point, layer.title),
        "difference": full and {rank: point.accuracy[rank] - full[rank] for rank in RANKS},
        "not_below_full": full and all(point.accuracy[rank] >= full[rank] for rank in RANKS),
        "not_below_control": control
        and all(point.accuracy[rank] >= control.accuracy[rank] for rank in RANKS),
        "latency_speedup": full_latency / point.latency_us
        if full_latency and point.latency_us
        else None,
        "train_seconds": layer.train_seconds,
        "paper": layer.paper,
        "published_speedup": paper_tables.speedup(results.corpus, layer.paper),
    }


def _measured(point: Point, title: str) -> dict[str, Any]:
    return {
        "title": title,
        "split": point.split,
        "experts_searched": point.dial.get("experts_searched"),
        "accuracy": point.accuracy,
        "precision": point.precision,
        "flops_speedup": point.flops_speedup,
        "latency_us": point.latency_us,
    }


# --- the paper's tables -------------------------------------------------------------------------


def _beside(results: Results, rows: Iterable[Published]) -> list[dict[str, Any]]:
    """Each published row with all that was measured here under its name."""
    return [
        {"method": row.method, "published": _published(row), "ours": _ours(results, row.method)}
        for row in rows
    ]


def _published(row: Published) -> dict[str, Any]:
    return {
        "accuracy": row.accuracy,
        "flops_speedup": row.flops_speedup,
        "latency_ms": row.latency_ms,
    }


def _ours(results: Results, method: str) -> list[dict[str, Any]]:
    if method == "Full":
        return _our_full(results.comparison)
    groups: dict[str, list[Point]] = {}
    for point in results.comparison.measured:
        layer = results.layers[point.name] if point.method == "ds" else None
        if method in (point.paper, layer and layer.paper):
            groups.setdefault(point.name, []).append(point)
    found = []
    for name, points in groups.items():
        point = _best(points)
        assert point is not None  # noqa: S101 - a group has a point
        layer = results.layers.get(name)
        found.append(_measured(point, layer.title if layer else name))
    tested = [entry for entry in found if entry["split"] == "test"]
    return tested or found


def _our_full(comparison: Comparison) -> list[dict[str, Any]]:
    split = "test" if comparison.full.get("test") else "valid"
    latency = _latency(_best(of_method(comparison, FULL)))
    return [
        {
            "title": "Full softmax",
            "split": split,
            "experts_searched": None,
            "accuracy": comparison.full.get(split),
            "precision": None,
            "flops_speedup": None,
            "latency_us": latency,
        }
    ]


def _mitosis_stages(results: Results) -> list[dict[str, Any]]:
    published = paper_tables.MITOSIS.get(results.corpus, {})
    ours = {stage.experts: stage for stage in results.mitosis.stages} if results.mitosis else {}
    return [
        {
            "experts": experts,
            "published": _published(published[experts]) if experts in published else None,
            "ours": ours[experts].model_dump() if experts in ours else None,
        }
        for experts in sorted({*published, *ours})
    ]


# --- Markdown -----------------------------------------------------------------------------------


def markdown(summaries: Iterable[dict[str, Any]]) -> str:
    """For each run a sentence and the headline as a table."""
    return "\n\n".join(_markdown(summary) for summary in summaries)


def _markdown(summary: dict[str, Any]) -> str:
    on = _one_split(summary["headline"])
    full = summary["full"]["accuracy"].get(on)
    lines = [
        f"{CORPORA.get(summary['corpus'], summary['corpus'])}, {summary['n_classes']:,} classes,"
        f" measured on the {SPLIT_NAMES[on]} split"
        + (f" ({summary['rows'][on]:,} rows)" if summary["rows"].get(on) else "")
        + ":",
        "",
        "| layer | label accuracy at 1 / 5 / 10 | none below full / control"
        " | precision at 1 / 10 | FLOPs speedup | paper | query | training |",
        "|---|---|---|---|---|---|---|---|",
    ]
    if full:
        microseconds = _us(summary["full"]["latency_us"])
        lines.append(
            f"| full softmax | {_shares(full)} | | 1.000 / 1.000 | 1x | | {microseconds} | |"
        )
    control = summary["control"]
    if control:
        lines.append(
            f"| full softmax, trained on{_elsewhere(control, on)}"
            f" | {_shares(control['accuracy'])} | | {_precision(control)} | 1x | |"
            f" | {_seconds(control['train_seconds'])} |"
        )
    lines += [
        f"| {_titled(entry)}{_elsewhere(entry, on)} | {_shares(entry['accuracy'])}"
        f" | {_yes(entry['not_below_full'])} / {_yes(entry['not_below_control'])}"
        f" | {_precision(entry)}"
        f" | {_times(entry['flops_speedup'])} | {_times(entry['published_speedup'])}"
        f" | {_us(entry['latency_us'])} | {_seconds(entry['train_seconds'])} |"
        for entry in summary["headline"]
    ]
    lost = {name: count for name, count in summary.get("classes_out_of_reach", {}).items() if count}
    if lost:
        which = ", ".join(f"{count:,} in {name}" for name, count in lost.items())
        lines += ["", f"Classes kept only in experts that hardly any row comes to: {which}."]
    return "\n".join(lines)


def _titled(entry: dict[str, Any]) -> str:
    title, kind = entry["title"], entry["kind"]
    return title if kind in title else f"{title}, {kind}"


SPLIT_NAMES = {"valid": "validation", "test": "test"}


def _one_split(entries: list[dict[str, Any]]) -> str:
    return "test" if not entries or any(e["split"] == "test" for e in entries) else "valid"


def _elsewhere(entry: dict[str, Any], split: str) -> str:
    return "" if entry["split"] == split else f" ({SPLIT_NAMES[entry['split']]} split)"


def _shares(accuracy: dict[str, float]) -> str:
    return " / ".join(f"{accuracy[rank]:.4f}" for rank in RANKS)


def _precision(entry: dict[str, Any]) -> str:
    found = entry["precision"]
    return "" if found is None else f"{found['1']:.3f} / {found['10']:.3f}"


def _yes(value: bool | None) -> str:
    return "?" if value is None else "yes" if value else "no"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f} us"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f} s"
