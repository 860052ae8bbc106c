"""What a report says of one trained layer.

K experts, N classes.
"""

import shlex
from typing import Any

import numpy as np

from trainer.report import layer_figures
from trainer.report.format import count, plural, seconds, share, times
from trainer.report.page import Block, Cell, Code, Column, Picture, Section, Table, Text, WordLists
from trainer.report.runs import HARDLY_USED, LayerFacts, LayerRun

SMALLEST = 6  # experts whose words are listed
FEW = 5  # words in more experts than this are left out of the lists
WORDS_SHOWN = 60


def layer_sections(run: LayerRun, anchor: str) -> list[Section]:
    """The chapter of a run that is one layer and nothing else."""
    measured = _summary_table(run.summary)
    sections = [Section("What it reaches", [measured])]
    if run.memory:
        sections.append(Section("Memory while training", [memory_picture(run.memory, anchor)]))
    sections.append(Section("Inside the layer", inside(run.layer, anchor)))
    sections.append(
        Section(
            "How it was made",
            [Code(train_command(run)), settings_table(run.config)],
        )
    )
    return sections


def _summary_table(summary: dict[str, Any]) -> Table:
    on = f", on {summary['on']}" if summary.get("on") else ""
    known = {
        "accuracy": ("accuracy" + on, share),
        "full_accuracy": ("a full softmax's" + on, share),
        "precision": ("precision against the full softmax" + on, share),
        "perplexity": ("perplexity" + on, lambda v: f"{v:.2f}"),
        "full_perplexity": ("a full softmax's perplexity" + on, lambda v: f"{v:.2f}"),
        "log_prob_error": (
            "the first class's log-probability is off by, on average",
            lambda v: f"{v:.4f}",
        ),
        "purity": ("classes in exactly their expert", share),
        "flops_speedup": ("FLOPs speedup", times),
        "mean_rows": ("classes scored for an answer, on average", lambda v: f"{v:,.1f}"),
        "mean_copies": ("copies of a class, on average", lambda v: f"{v:.3f}"),
        "seconds": ("training", seconds),
        "full_seconds": ("training of the full softmax", seconds),
    }
    rows = []
    for key, (name, form) in known.items():
        value = summary.get(key)
        if isinstance(value, dict):
            known_at = {rank: at for rank, at in value.items() if at is not None}
            rows += [[Cell(f"{name}, at {rank}"), Cell(form(at))] for rank, at in known_at.items()]
        elif value is not None:
            rows.append([Cell(name), Cell(form(value))])
    return Table("As its training reported.", [Column("", ""), Column("measured")], rows)


def memory_picture(memory: list[Any], anchor: str, published: float | None = None) -> Picture:
    peak = max(point.memory for point in memory)
    return Picture(
        f"{anchor}-memory.png",
        layer_figures.memory_curve(memory, published),
        alt=f"Parameter memory over training; its peak is {peak:.2f} full softmaxes.",
        caption="What gate and experts hold together, as a multiple of one full softmax. A split"
        " doubles the experts; pruning takes their rows down again.",
        narrow=True,
    )


# --- pictures and words -------------------------------------------------------------------------


def inside(layer: LayerFacts, anchor: str) -> list[Block]:
    n_experts, n_classes = layer.held.shape
    unused = int((layer.utilization == 0).sum())
    by = "by number" if layer.frequencies is None else "most frequent first"
    matrix = Picture(
        f"{anchor}-experts.png",
        layer_figures.expert_matrix(layer),
        alt=f"{n_experts} experts by {n_classes:,} classes: which expert holds which class.",
        caption=f"Which expert holds which class; classes stand {by}. {reach_sentence(layer)}",
    )
    bars = Picture(
        f"{anchor}-utilization.png",
        layer_figures.utilization_bars(layer),
        alt="Bars: how often each expert is chosen, and how many classes it holds.",
        caption="How often each expert is chosen, and how many classes are scored then."
        + (f" {plural(unused, 'expert')} of {n_experts} got no row at all." if unused else ""),
    )
    return [matrix, bars, *_redundancy(layer, anchor), *_smallest_words(layer)]


def reach_sentence(layer: LayerFacts) -> str:
    """How many classes have copies only in experts that receive hardly any query row."""
    n_experts, n_classes = layer.held.shape
    if not layer.out_of_reach:
        return "Every class that is held is also in an expert that gets rows."
    hardly = int((layer.utilization < HARDLY_USED).sum())
    return (
        f"{layer.out_of_reach:,} of {n_classes:,} classes are only in experts that get less than"
        f" {HARDLY_USED:.1%} of the rows ({hardly} of {n_experts}): they are kept, but hardly"
        " ever among the answers."
    )


def _redundancy(layer: LayerFacts, anchor: str) -> list[Block]:
    if layer.frequencies is None:
        return [
            Text(
                f"A class is in {layer.copies.mean():.3f} experts on average. The training labels"
                " are not at hand, so copies are not drawn against frequency."
            )
        ]
    left_out = int(((layer.copies == 0) | (layer.frequencies == 0)).sum())
    return [
        Picture(
            f"{anchor}-redundancy.png",
            layer_figures.redundancy_map(layer_figures.redundancy(layer.frequencies, layer.copies)),
            alt="Heat map: the more frequent a word, the more experts hold it.",
            caption="Redundancy: in how many experts a word is, against how often it occurs; the"
            " darker, the more words. The orange line is the mean. Over all words it is"
            f" {layer.copies.mean():.3f} copies."
            + (
                f" {plural(left_out, 'word')} in no expert or not in the training text cannot be"
                " shown."
                if left_out
                else ""
            ),
            narrow=True,
        )
    ]


def _smallest_words(layer: LayerFacts) -> list[Block]:
    found = smallest_experts(layer)
    if layer.words is None or not found:
        return [Text("The classes have no names here, so no words are listed.")]
    lists = [
        (
            f"Expert {entry['expert']}: {plural(entry['classes'], 'class', 'classes')},"
            f" {entry['utilization']:.2%} of rows",
            entry["words"] or ["(none in so few experts)"],
        )
        for entry in found
    ]
    return [
        Text(
            f"The smallest experts that get at least {HARDLY_USED:.1%} of the rows, and their"
            f" words: those that at most {FEW} experts hold, most frequent first,"
            f" {WORDS_SHOWN} at most."
        ),
        WordLists(lists),
    ]


def smallest_experts(layer: LayerFacts) -> list[dict[str, Any]]:
    """The smallest experts in use, with the words that few other experts have."""
    order, sizes, copies = layer_figures.class_order(layer), layer.sizes, layer.copies
    used = [
        k
        for k in np.argsort(sizes, kind="stable")
        if sizes[k] and layer.utilization[k] >= HARDLY_USED
    ]
    found = []
    for expert in used[:SMALLEST]:
        own = [c for c in order if layer.held[expert, c] and copies[c] <= FEW]
        found.append(
            {
                "expert": int(expert),
                "classes": int(sizes[expert]),
                "utilization": float(layer.utilization[expert]),
                "in_few_experts": len(own),
                "words": [layer.words[c] for c in own[:WORDS_SHOWN]] if layer.words else None,
            }
        )
    return found


def layer_numbers(layer: LayerFacts) -> dict[str, Any]:
    """All that the pictures show."""
    numbers = {
        "title": layer.title,
        "n_experts": layer.held.shape[0],
        "n_classes": layer.held.shape[1],
        "expert_sizes": layer.sizes.tolist(),
        "utilization": layer.utilization.tolist(),
        "mean_rows": float(layer.utilization @ layer.sizes),
        "mean_copies": float(layer.copies.mean()),
        "classes_out_of_reach": layer.out_of_reach,
        "classes_by_copies": np.bincount(layer.copies).tolist(),
        "smallest_experts": smallest_experts(layer),
        "redundancy": None,
    }
    if layer.frequencies is not None:
        counted = layer_figures.redundancy(layer.frequencies, layer.copies)
        means = [None if np.isnan(mean) else float(mean) for mean in counted.mean_copies]
        numbers["redundancy"] = {
            "frequency_edges": counted.frequency_edges.tolist(),
            "copies_edges": counted.copies_edges.tolist(),
            "words": counted.words.tolist(),
            "mean_copies": means,
        }
    return numbers


# --- how it was made ----------------------------------------------------------------------------


def train_command(run: LayerRun) -> str:
    """The command such a run comes from; names in capitals were not recorded."""
    config = run.config
    if isinstance(config.get("command"), str):
        return config["command"]
    words = ["dss", "train"]
    if config["task"] == "synthetic":
        words += ["--task", "synthetic", "--size", str(config.get("size"))]
    else:
        for name in ("hidden", "labels", "head"):
            words += [f"--{name}", str(config[name])] if config.get(name) else []
        if run.summary.get("on") == "validation vectors":
            words += ["--valid-hidden", "VALID_HIDDEN", "--valid-labels", "VALID_LABELS"]
        fidelity = config.get("objective") == "fidelity"
        words += ["--objective", "fidelity"] if fidelity else []
        for name in ("speedup", "rows") if fidelity else ("method", "speedup", "rows"):
            words += [f"--{name}", f"{config[name]}"] if config.get(name) is not None else []
    words += ["--experts", str(config.get("n_experts"))]
    words += ["--keep-one" if config.get("keep_one", True) else "--no-keep-one"]
    return shlex.join([*words, "--seed", str(config.get("seed", 0)), "--out", run.name])


def settings_table(config: dict[str, Any]) -> Table:
    rows = [
        [Cell(name), Cell("" if value is None else str(value))] for name, value in config.items()
    ]
    return Table(
        f"All {count(len(rows))} settings of the run.",
        [Column("setting", ""), Column("value", "")],
        rows,
        folded=True,
    )


def made_sections(command: str) -> Section:
    return Section("This page", [Text("was written by"), Code(command)])
