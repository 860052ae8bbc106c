"""What the trainer's commands print when they are done: JSON, a drawing on a terminal, or text."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from service.terminal import console

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType
    from rich.table import Table

    from service.bundle import Bundle

WIDTH = 17  # of names before figures


def show_training(folder: Path, summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        console.show_json({"run": str(folder), **summary})
    elif "purity" in summary:
        _show_synthetic(folder, summary)
    elif console.draws():
        console.show(_training(folder, summary))
    else:
        click.echo(training_table(folder, summary))


def _show_synthetic(folder: Path, summary: dict[str, Any]) -> None:
    full = summary["full_accuracy"]
    accuracy = f"{summary['accuracy']:.4f}" + (
        "" if full is None else f" (full softmax {full:.4f})"
    )
    purity, copies = f"{summary['purity']:.4f}", f"{summary['mean_copies']:.3f}"
    speedup, seconds = f"{summary['flops_speedup']:.2f}x", f"{summary['seconds']:.0f} s"
    if not console.draws():
        click.echo(
            f"{folder}: accuracy {accuracy}, purity {purity}, copies {copies},"
            f" FLOPs speedup {speedup} in {seconds}"
        )
        return
    _show_facts(
        str(folder),
        ("accuracy", accuracy),
        ("purity", purity),
        ("copies", f"{copies} per class"),
        ("speedup", f"{speedup} fewer FLOPs than a full softmax"),
        ("time", seconds),
    )


# --- a layer from vectors ----------------------------------------------------------------------


def training_table(folder: Path, summary: dict[str, Any]) -> str:
    return "\n".join(
        [
            _title(folder, summary),
            f"{'':<{WIDTH}} " + " ".join(f"{f'top {k}':>8}" for k in summary["accuracy_at"]),
            *(
                f"{name:<{WIDTH}} " + " ".join(f"{cell:>8}" for cell in cells)
                for name, cells in _shares(summary)
            ),
            *(f"{name:<{WIDTH}} {value}" for name, value in _facts(summary)),
            *_sentences(summary),
        ]
    )


def _title(folder: Path, summary: dict[str, Any]) -> str:
    return f"{folder}: measured on {summary['report_rows']:,} {summary['on']}"


def _shares(summary: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Names and figures at 1, 5 and 10; indented names are what the one above is compared with."""
    rows = [
        ("precision", summary["precision"]),
        ("label accuracy", summary["accuracy_at"]),
        ("  before learning", summary.get("start_accuracy_at")),
        ("  full softmax", summary["full_accuracy_at"]),
    ]
    return [
        (name, ["-" if value is None else f"{value:.4f}" for value in values.values()])
        for name, values in rows
        if values is not None
    ]


def _facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    largest, phases = summary["largest_expert"], summary["phases"]
    longest = sorted(phases, key=lambda name: -phases[name])
    spent = ", ".join(f"{name} {phases[name]:.0f}" for name in longest if phases[name] >= 0.5)
    speedup = f"FLOPs speedup {summary['flops_speedup']:.2f}x"
    return [
        (
            "perplexity",
            f"{summary['perplexity']:.2f}, of the full softmax {summary['full_perplexity']:.2f}",
        ),
        *(
            [("log prob error", f"{summary['log_prob_error']:.4f}, the first class's, mean")]
            if "log_prob_error" in summary
            else []
        ),
        (
            "budget",
            f"{summary['rows_asked']:,.1f} classes per answer, used {summary['mean_rows']:,.1f}"
            f" ({speedup})",
        ),
        (
            "largest expert",
            f"{largest['classes']:,} classes, {100 * largest['share']:.1f}% of all;"
            f" {summary['mean_copies']:.3f} copies of a class on average",
        ),
        ("time", f"{summary['seconds']:.0f} s" + (f": {spent}" if spent else "")),
    ]


def _sentences(summary: dict[str, Any]) -> list[str]:
    kept = (
        ["Learning did not improve the layer on held-out rows, so it is kept as it began."]
        if summary["kept"] == "start"
        else []
    )
    return [*kept, summary["verdict"]]


def _training(folder: Path, summary: dict[str, Any]) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    shares = _table_by_k(list(summary["accuracy_at"]), _shares(summary))
    words = [Text(sentence, style="bold") for sentence in _sentences(summary)]
    title = Text(_title(folder, summary), style="bold")
    return Group(title, shares, console.facts(_facts(summary)), *words)


def export_facts(written: "Bundle", destination: Path) -> dict[str, Any]:
    manifest = written.manifest
    training = manifest.training.model_dump()
    return {
        "bundle": str(destination),
        "classes": manifest.n_classes,
        "experts": manifest.n_experts,
        "bytes": sum(entry.bytes for entry in manifest.files.values()),
        "precision": manifest.precision,
        "head": manifest.head,
        "flops_speedup": manifest.training.flops_speedup,
        "accuracy": manifest.training.accuracy,
        "svd": training.get("svd"),
    }


def show_evaluation(figures: dict[str, Any], as_json: bool) -> None:
    from trainer.evaluation import measure

    if as_json:
        console.show_json(figures)
    elif console.draws():
        console.show(_evaluation(figures))
    else:
        click.echo(measure.table(figures))


def _show_facts(title: str, *pairs: tuple[str, str]) -> None:
    from rich.text import Text

    console.show(Text(title, style="bold"), console.facts(pairs))


def _evaluation(figures: dict[str, Any]) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    from service.bundle.manifest import RECALL_AT
    from trainer.evaluation import measure

    shares = _table_by_k(
        [str(k) for k in RECALL_AT],
        [
            (name, measure.cells(values, style))
            for name, values, style in measure.rows_by_k(figures)
        ],
    )
    title = Text(figures["bundle"], style="bold")
    return Group(title, shares, console.facts(measure.summary(figures)))


def _table_by_k(ks: list[str], rows: "Iterable[tuple[str, list[str]]]") -> "Table":
    from rich import box
    from rich.table import Table

    shares = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shares.add_column("", style="cyan")
    for k in ks:
        shares.add_column(f"top {k}", justify="right")
    for name, cells in rows:
        shares.add_row(name, *cells)
    return shares
