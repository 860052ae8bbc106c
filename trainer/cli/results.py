"""What the trainer's commands print when they are done: JSON, a drawing on a terminal, or text."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from service.terminal import console

if TYPE_CHECKING:
    from rich.console import RenderableType

    from service.bundle import Bundle


def show_training(folder: Path, summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        console.show_json({"run": str(folder), **summary})
        return
    full = summary["full_accuracy"]
    accuracy = f"{summary['accuracy']:.4f}" + (
        "" if full is None else f" (full softmax {full:.4f})"
    )
    copies, speedup = f"{summary['mean_copies']:.3f}", f"{summary['flops_speedup']:.2f}x"
    seconds = f"{summary['seconds']:.0f} s"
    if not console.draws():
        more = (
            f"purity {summary['purity']:.4f}"
            if "purity" in summary
            else f"{summary['mean_rows']:.1f} classes per answer"
        )
        click.echo(
            f"{folder}: accuracy {accuracy}, {more}, copies {copies},"
            f" FLOPs speedup {speedup} in {seconds}"
        )
        return
    more = (
        ("purity", f"{summary['purity']:.4f}")
        if "purity" in summary
        else ("classes", f"{summary['mean_rows']:.1f} per answer")
    )
    _show_facts(
        str(folder),
        ("accuracy", accuracy),
        more,
        ("copies", f"{copies} per class"),
        ("speedup", f"{speedup} fewer FLOPs than a full softmax"),
        ("time", seconds),
    )


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
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from service.bundle.manifest import RECALL_AT
    from trainer.evaluation import measure

    shares = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shares.add_column("", style="cyan")
    for k in RECALL_AT:
        shares.add_column(f"top {k}", justify="right")
    for name, values, style in measure.rows_by_k(figures):
        shares.add_row(name, *measure.cells(values, style))
    title = Text(figures["bundle"], style="bold")
    return Group(title, shares, console.facts(measure.summary(figures)))
