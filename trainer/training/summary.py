"""What a run reaches, on rows that neither training nor any choice has seen.

K experts, N classes.
"""

from typing import Any

import torch

from trainer.layer import DSSoftmax
from trainer.layer.head_softmax import HeadSoftmax
from trainer.training import metrics
from trainer.training.config import VectorsConfig
from trainer.training.problem import HeldOut, Learned, Problem
from trainer.training.verdict import verdict


def start_figures(problem: Problem, start: DSSoftmax) -> dict[str, Any]:
    """Of a layer that has learned nothing yet: what its experts can reach, by the rows for choices,
    and label accuracy on the rows for reported figures."""
    choice, report = problem.choice, problem.report
    return {
        "reachable": metrics.reachable_recall(start, choice.hidden, choice.full.best),
        "start_accuracy_at": metrics.accuracy_at(start, report.hidden, report.labels),
    }


def summarize(
    config: VectorsConfig,
    problem: Problem,
    learned: Learned,
    start: dict[str, Any],
    on: str,
) -> dict[str, Any]:
    """What summary.json holds; `start` has the figures of the layer before it learned."""
    layer, report = learned.layer.eval(), problem.report
    found = report.figures(layer)
    full = report.full.accuracy_at()
    utilization = metrics.utilization(layer, report.hidden).tolist()
    summary = {
        "task": "vectors",
        "objective": config.objective,
        "method": config.method,
        "keep_one": config.keep_one,
        **found,
        "accuracy": found["accuracy"]["1"],
        "accuracy_at": found["accuracy"],
        "full_accuracy": full["1"],
        "full_accuracy_at": full,
        **start,
        "kept": "start" if learned.kept_start else "learned",
        "precision": metrics.precision_at(layer, report.hidden, report.full.best),
        **perplexities(layer, report),
        "mean_copies": metrics.copies(layer).double().mean().item(),
        "largest_expert": largest_expert(layer, utilization),
        "utilization": utilization,
        "seed": config.seed,
        "on": on,
        "report_rows": len(report.labels),
        "choice_rows": len(problem.choice.labels),
    }
    if learned.memory:
        summary["peak_memory"] = learned.peak_memory
    summary |= {"rows_asked": problem.budget, "speedup_asked": config.speedup}
    return summary | {"verdict": verdict(summary)}


def perplexities(layer: DSSoftmax, rows: HeldOut) -> dict[str, float]:
    own, full = (
        metrics.label_log_probs(layer, rows.hidden, rows.labels),
        rows.full.log_prob.double(),
    )
    found = {
        "perplexity": metrics.perplexity(own.mean().item()),
        "full_perplexity": metrics.perplexity(full.mean().item()),
    }
    if isinstance(layer, HeadSoftmax):
        # Of the first class as of any other: scores are the head's, so only normalisers differ.
        found["log_prob_error"] = (own - full).abs().mean().item()
    return found


def largest_expert(layer: DSSoftmax, utilization: list[float]) -> dict[str, Any]:
    sizes = layer.expert_sizes
    number = int(torch.tensor(sizes).argmax())
    return {
        "expert": number,
        "classes": sizes[number],
        "share": sizes[number] / layer.n_classes,
        "utilization": utilization[number],
    }
