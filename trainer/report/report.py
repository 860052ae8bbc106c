"""A report on finished runs: read them, lay out what is to be said, write one page.

K experts, N classes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.errors import DSSError
from trainer.data.files import write_json, write_whole
from trainer.report.language_model import language_model_sections
from trainer.report.layer import layer_numbers, layer_sections, made_sections
from trainer.report.numbers import CORPORA, markdown, summary_numbers
from trainer.report.page import Chapter, render
from trainer.report.runs import LanguageModelRun, LayerRun, Run, open_run

__all__ = ["Report", "gather", "markdown", "summary_numbers", "write"]

PAGE = "report.html"
NUMBERS = "report.json"


class NotAFolder(DSSError):
    pass


class NothingToTabulate(DSSError):
    pass


@dataclass(frozen=True)
class Report:
    page: str
    numbers: dict[str, Any]
    pictures: dict[str, bytes]  # by file name


def gather(folders: Sequence[Path]) -> list[Run]:
    """Read every run before anything is drawn or written."""
    return [open_run(folder) for folder in folders]


def make(found: Sequence[Run], command: str) -> Report:
    anchors = _anchors([run.name for run in found])
    chapters = [_chapter(run, anchor) for run, anchor in zip(found, anchors, strict=True)]
    chapters[-1].sections.append(made_sections(command))
    return Report(
        page=render(_title(found), chapters),
        numbers={"command": command, "runs": [_numbers(run) for run in found]},
        pictures={p.file: p.png for chapter in chapters for p in chapter.pictures},
    )


def write(folders: Sequence[Path], out: Path, command: str) -> Report:
    """Nothing is written unless every run could be read and drawn."""
    found = gather(folders)
    if out.exists() and not out.is_dir():
        raise NotAFolder(f"{out} is not a folder.")
    report = make(found, command)
    out.mkdir(parents=True, exist_ok=True)
    for name, content in report.pictures.items():
        write_whole(out / name, content)
    write_json(out / NUMBERS, report.numbers)
    write_whole(out / PAGE, report.page.encode())
    return report


def summaries(found: Sequence[Run]) -> list[dict[str, Any]]:
    compared = [run for run in found if isinstance(run, LanguageModelRun)]
    if not compared:
        raise NothingToTabulate("None of these runs compares methods: there is no table to make.")
    return [
        summary_numbers(run.results)
        | {
            "classes_out_of_reach": {n: layer.out_of_reach for n, layer in run.pictured.items()},
            "mean_copies": {n: float(layer.copies.mean()) for n, layer in run.pictured.items()},
        }
        for run in compared
    ]


# --- one run, one chapter -----------------------------------------------------------------------


def _chapter(run: Run, anchor: str) -> Chapter:
    if isinstance(run, LanguageModelRun):
        comparison = run.results.comparison
        return Chapter(
            CORPORA.get(run.results.corpus, run.results.corpus),
            f"A language model: the next word out of {comparison.n_classes:,}, from a hidden"
            f" vector of {comparison.hidden_size:,} numbers. Run {run.name}.",
            anchor,
            language_model_sections(run, anchor),
        )
    n_experts, n_classes = run.layer.held.shape
    what = f"{n_classes:,} classes in {n_experts:,} experts"
    if run.summary.get("task") == "synthetic":
        title, subtitle = f"Synthetic, {run.summary['size']}", f"{what}. Run {run.name}."
    else:
        title, subtitle = f"A layer learned from vectors: {run.name}", f"{what}."
    return Chapter(title, subtitle, anchor, layer_sections(run, anchor))


def _numbers(run: Run) -> dict[str, Any]:
    if isinstance(run, LayerRun):
        return {
            "name": run.name,
            "summary": run.summary,
            "settings": run.config,
            "layers": {run.name: layer_numbers(run.layer)},
            "memory": [point.model_dump() for point in run.memory],
        }
    mitosis = run.results.mitosis
    return {
        "name": run.name,
        "summary": summary_numbers(run.results),
        "settings": run.config,
        "points": [point.model_dump() for point in run.results.comparison.measured],
        "layers": {name: layer_numbers(layer) for name, layer in run.pictured.items()},
        "memory": [point.model_dump() for point in mitosis.memory] if mitosis else [],
    }


def _title(found: Sequence[Run]) -> str:
    if len(found) == 1 and isinstance(found[0], LayerRun):
        return "A doubly sparse softmax, looked into"
    return "Doubly sparse softmax: what was measured"


def _anchors(names: Sequence[str]) -> list[str]:
    """Names fit for files and links, each once."""
    anchors: list[str] = []
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "run"
        number, anchor = 1, plain
        while anchor in anchors:
            number += 1
            anchor = f"{plain}-{number}"
        anchors.append(anchor)
    return anchors
