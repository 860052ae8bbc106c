"""What a report says of a language-model run: methods side by side, and beside the paper."""

from typing import Any

from trainer.report import trade_off
from trainer.report.format import (
    AT,
    NOTHING,
    SPLITS,
    TIMES,
    cells,
    count,
    microseconds,
    plural,
    seconds,
    share,
    signed,
    times,
)
from trainer.report.layer import inside, reach_sentence, settings_table
from trainer.report.numbers import CONTROL, FULL, of_method, summary_numbers
from trainer.report.page import Block, Cell, Code, Column, Picture, Section, Table, Text
from trainer.report.paper import mitosis, paper_tables
from trainer.report.runs import RANKS, LanguageModelRun, Point, Results

OUR_NAMES = {
    FULL: "Full softmax",
    CONTROL: "Full softmax, retrained",
    **{name: look.label for name, look in trade_off.LOOKS.items()},
}


def language_model_sections(run: LanguageModelRun, anchor: str) -> list[Section]:
    results = run.results
    summary = summary_numbers(results)
    sections = [
        Section("What it reaches", _headline(run, summary)),
        Section("Accuracy against cost, all methods", _trade_offs(results, anchor)),
        Section("The paper's tables and ours", paper_tables(summary)),
        Section("Mitosis", mitosis(results, summary, anchor)),
    ]
    for name, layer in run.pictured.items():
        sections.append(
            Section(f"Inside {layer.title} ({name})", inside(layer, f"{anchor}-{name}"))
        )
    if not run.pictured:
        nothing = Text("No layer that keeps a copy of every class was trained, so none is drawn.")
        sections.append(Section("Inside the layer", [nothing]))
    sections.append(Section("How it was made", _made(run)))
    return sections


# --- headline -----------------------------------------------------------------------------------


def _headline(run: LanguageModelRun, summary: dict[str, Any]) -> list[Block]:
    entries = summary["headline"]
    splits = sorted({entry["split"] for entry in entries} or {"valid"})
    rows = [row for split in splits for row in _reference_rows(summary, split, len(splits) > 1)]
    rows += [_headline_row(entry, show_split=len(splits) > 1) for entry in entries]
    return [
        _encoder_sentence(summary),
        Table(
            "Layers trained here beside the full softmax they replace, measured on"
            f" {_rows_sentence(summary, splits)}. Below each accuracy: its difference from the full"
            " softmax's. The retrained full softmax is a control: it had as much training as the"
            " layers.",
            [
                Column("layer", ""),
                Column("classes", ""),
                *AT,
                Column("none below full"),
                Column("FLOPs speedup"),
                Column("µs a query"),
                Column("training"),
            ],
            rows,
        ),
        *(
            Text(f"{layer.title} ({name}): {reach_sentence(layer)}")
            for name, layer in run.pictured.items()
            if layer.out_of_reach
        ),
        *_headline_gaps(summary),
    ]


def _encoder_sentence(summary: dict[str, Any]) -> Text:
    encoder = summary["encoder"]
    made = "trained by this run" if encoder.get("trained_here") else "given, already trained"
    parts = [
        f"{encoder[split]['perplexity']:.2f} on {name} text"
        for split, name in SPLITS.items()
        if isinstance(encoder.get(split), dict) and "perplexity" in encoder[split]
    ]
    words = " and ".join(parts)
    return Text(
        f"The encoder was {made}"
        + (f"; its perplexity is {words}." if parts else ".")
        + " All methods answer from its hidden vectors."
    )


def _rows_sentence(summary: dict[str, Any], splits: list[str]) -> str:
    return " and ".join(
        f"the {SPLITS[split]} split"
        + (f" ({summary['rows'][split]:,} words)" if summary["rows"].get(split) else "")
        for split in splits
    )


def _reference_rows(summary: dict[str, Any], split: str, show_split: bool) -> list[list[Cell]]:
    """The full softmax, and the control where it was measured on the same words."""
    full, control = summary["full"], summary["control"]
    note = SPLITS[split] if show_split else ""
    rows = []
    accuracy = full["accuracy"].get(split)
    if accuracy:
        rows.append(
            [
                Cell("Full softmax", note, "published"),
                *cells("all", *(share(accuracy[rank]) for rank in RANKS), style="published"),
                *cells("", times(1), microseconds(full["latency_us"]), "", style="published"),
            ]
        )
    if control and control["split"] == split:
        differences = {r: control["accuracy"][r] - accuracy[r] for r in RANKS} if accuracy else {}
        rows.append(
            [
                Cell("Full softmax, trained on", note, "published"),
                Cell("all", style="published"),
                *_accuracies(control["accuracy"], differences, "published"),
                *cells("", times(control["flops_speedup"]), style="published"),
                Cell(microseconds(control["latency_us"]), style="published"),
                Cell(seconds(control["train_seconds"]), style="published"),
            ]
        )
    return rows


def _accuracies(
    accuracy: dict[str, float], differences: dict[str, float] | None, style: str = ""
) -> list[Cell]:
    return [
        Cell(share(accuracy[rank]), signed(differences[rank]) if differences else "", style)
        for rank in RANKS
    ]


def _headline_row(entry: dict[str, Any], *, show_split: bool) -> list[Cell]:
    about = [entry["kind"]]
    about += [f"{entry['method']} start"] if entry["method"] != "mitosis" else []
    about += [SPLITS[entry["split"]]] if show_split else []
    searched = entry["experts_searched"] or 1
    about += [f"{searched} experts searched"] if searched > 1 else []
    asked, published = entry["speedup_asked"], entry["published_speedup"]
    notes = [f"asked {asked:g}{TIMES}"] if asked else []
    notes += [f"paper {published:g}{TIMES}"] if published else []
    good = entry["not_below_full"]
    faster = entry["latency_speedup"]
    return [
        Cell(entry["title"], ", ".join(about)),
        Cell("each kept" if entry["keep_one"] else "may be dropped"),
        *_accuracies(entry["accuracy"], entry["difference"]),
        Cell(
            NOTHING if good is None else "yes" if good else "no",
            {True: "nor below the control", False: "but below the control" if good else ""}.get(
                entry["not_below_control"], ""
            ),
            "good" if good else "bad",
        ),
        Cell(times(entry["flops_speedup"]), ", ".join(notes)),
        Cell(microseconds(entry["latency_us"]), f"{faster:.1f}{TIMES} faster" if faster else ""),
        Cell(seconds(entry["train_seconds"])),
    ]


def _headline_gaps(summary: dict[str, Any]) -> list[Block]:
    gaps = []
    if not summary["headline"]:
        gaps.append("No trained layer was measured.")
    if summary["control"] is None:
        gaps.append("The control, a full softmax retrained as long, was not run.")
    elif summary["headline"] and summary["control"]["split"] not in {
        entry["split"] for entry in summary["headline"]
    }:
        gaps.append(
            f"The control was measured on the {SPLITS[summary['control']['split']]} split only:"
            f" {' / '.join(share(summary['control']['accuracy'][rank]) for rank in RANKS)}."
        )
    if all(entry["latency_us"] is None for entry in summary["headline"]):
        gaps.append("Latencies were not measured.")
    return [Text(" ".join(gaps))] if gaps else []


# --- accuracy against cost ----------------------------------------------------------------------


def _trade_offs(results: Results, anchor: str) -> list[Block]:
    comparison = results.comparison
    split = "valid" if comparison.full.get("valid") else "test"
    full = comparison.full.get(split)
    control = next((p for p in of_method(comparison, CONTROL) if p.split == split), None)
    full_point = next((p for p in of_method(comparison, FULL) if p.split == split), None)
    shown = [p for p in comparison.measured if p.split == split and _look(results, p)]
    blocks: list[Block] = []
    by_speedup = [
        trade_off.Measured(_look(results, p), p.flops_speedup, p.accuracy)
        for p in shown
        if p.flops_speedup
    ]
    by_latency = [
        trade_off.Measured(_look(results, p), p.latency_us, p.accuracy)
        for p in shown
        if p.latency_us
    ]
    dashed = control.accuracy if control else None
    rule = (
        f"Measured on the {SPLITS[split]} split. Each mark is one setting of a method; lines join"
        " those that no other setting of it beats, pale marks are the others."
    )
    if full and by_speedup:
        blocks.append(
            Picture(
                f"{anchor}-accuracy-flops.png",
                trade_off.draw(by_speedup, trade_off.SPEEDUP, full, dashed, None),
                alt="Accuracy at 1, 5 and 10 against FLOPs speedup, a curve for each method.",
                caption=f"Accuracy against FLOPs. {rule}{_cut_off(by_speedup, full)}",
            )
        )
    if full and by_latency:
        blocks.append(
            Picture(
                f"{anchor}-accuracy-latency.png",
                trade_off.draw(
                    by_latency,
                    trade_off.LATENCY,
                    full,
                    dashed,
                    full_point.latency_us if full_point else None,
                ),
                alt="Accuracy at 1, 5 and 10 against microseconds a query, a curve per method.",
                caption="Accuracy against measured time, one query at a time. The small upright"
                f" stroke is the full softmax. {rule}{_cut_off(by_latency, full)}",
            )
        )
    blocks += [Text(sentence) for sentence in _missing_methods(results, by_speedup, by_latency)]
    blocks.append(_all_points(results))
    return blocks


def _look(results: Results, point: Point) -> str:
    """The name of a point's look; empty for points that are drawn as lines."""
    name = f"ds {results.layers[point.name].kind}" if point.method == "ds" else point.method
    return name if name in trade_off.LOOKS else ""


def _cut_off(points: list[trade_off.Measured], full: dict[str, float]) -> str:
    below = sum(
        any(point.accuracy[rank] < trade_off.lowest_shown(full, rank) for rank in RANKS)
        for point in points
    )
    if not below:
        return ""
    return (
        f" Panels begin at {trade_off.LOWEST_SHOWN:.0%} of the full softmax's accuracy, and"
        f" {plural(below, 'setting')} would be below."
    )


def _missing_methods(results: Results, by_speedup: list[Any], by_latency: list[Any]) -> list[str]:
    sentences = [
        f"{OUR_NAMES.get(skipped.method, skipped.method)} was left out: {skipped.skipped}"
        for skipped in results.comparison.skipped
    ]
    if not by_speedup:
        sentences.append("No method was measured for its FLOPs, so there is no such curve.")
    if not by_latency:
        sentences.append("Latencies were not measured, so there is no curve over time.")
    return sentences


def _all_points(results: Results) -> Table:
    points = results.comparison.measured
    columns = [
        Column("method", ""),
        Column("setting", ""),
        Column("split", ""),
        *AT,
        *(Column(f"precision at {rank}") for rank in RANKS),
        Column("FLOPs speedup"),
        Column("µs a query"),
        Column("training"),
        Column("building"),
    ]
    return Table(
        f"All {count(len(points))} measurements. Precision is the share of the full softmax's own"
        " first answers that are found; ● marks settings chosen on validation words.",
        columns,
        [_point_row(results, point) for point in points],
        folded=True,
    )


def _point_row(results: Results, point: Point) -> list[Cell]:
    layer = results.layers[point.name] if point.method == "ds" else None
    dial = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in point.dial.items())
    paper = point.paper or (layer and layer.paper)
    name = f"{layer.title} ({point.name})" if layer else point.name
    return [
        Cell(OUR_NAMES.get(_look(results, point) or point.method, point.method)),
        Cell(
            name + (" ●" if point.chosen else ""),
            "; ".join(text for text in (dial, f"paper's {paper}" if paper else "") if text),
        ),
        Cell(SPLITS[point.split]),
        *_accuracies(point.accuracy, None),
        *(Cell(share(point.precision[r] if point.precision else None)) for r in RANKS),
        Cell(times(point.flops_speedup)),
        Cell(microseconds(point.latency_us)),
        Cell(seconds(point.train_seconds)),
        Cell(seconds(point.build_seconds)),
    ]


# --- how it was made ----------------------------------------------------------------------------


def _made(run: LanguageModelRun) -> list[Block]:
    results = run.results
    command = results.command
    if command is None:
        encoder = "" if results.encoder.get("trained_here") else " --encoder ENCODER"
        command = f"dss task language-model --data DATA{encoder} --out {run.name}"
    machine = results.comparison.machine
    rows = [[Cell(str(name)), Cell(str(value))] for name, value in machine.items()]
    return [
        Code(command),
        Table(
            "The machine that all methods were measured on.",
            [Column("machine", ""), Column("", "")],
            rows,
        ),
        settings_table(run.config),
    ]
