"""Training on hidden vectors, labels and a trained head of the user.

M query rows, T held-out ones, D hidden, N classes.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.errors import DSSError
from service.terminal.messages import say
from service.terminal.phases import Phases
from trainer.data import held_out, run_folder
from trainer.data.arrays import Head, Vectors
from trainer.data.files import write_json
from trainer.data.rows import MappedRows, sample
from trainer.layer import DSSoftmax
from trainer.layer.head_softmax import HeadSoftmax
from trainer.training import mitosis
from trainer.training.config import MANY_CLASSES, VectorsConfig, to_dict
from trainer.training.full_softmax import estimated_normalisers, fitted_head, full_normalisers
from trainer.training.loop import Data
from trainer.training.methods import Method, method_of
from trainer.training.problem import HeldOut, Learned, Problem
from trainer.training.summary import start_figures, summarize
from trainer.training.verdict import KEPT, speedup

PARITY_ROWS = 1_000
# Of sampled rows: more scores by all classes would take minutes, more numbers too much memory.
MOST_SCORES = {"accuracy": 2**33, "fidelity": 2**34}
MOST_NUMBERS = 2**29
NORMALISERS = "normalisers.npy"
PHASES = "phases.json"  # the seconds that the run has taken so far


class TwoBudgets(DSSError):
    pass


class ExpertsNotDoubling(DSSError):
    pass


def run(
    config: VectorsConfig,
    files: dict[str, str],
    training: Vectors,
    valid: Vectors | None,
    head: Head | None,
    folder: Path,
    *,
    resume: bool = False,
    normalisers: Path | None = None,
    clock: Phases | None = None,
) -> dict[str, Any]:
    """Train and evaluate; returns what summary.json holds. `files` names the inputs for the run.

    `normalisers` is a file that runs on the same vectors share; see `full_normalisers`. The clock
    may have begun before.
    """
    clock = Phases() if clock is None else clock
    check_settings(config)
    method = method_of(config)
    settings = {"task": "vectors", **files, **to_dict(config)}
    run_folder.check_run(folder, settings, resume=resume)
    if resume:
        clock.add_earlier(earlier_seconds(folder))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    rows = split_rows(config, training, valid)
    if head is None:
        run_folder.open_run(folder, settings, resume=resume)
    try:
        problem = make_problem(config, rows, training, valid, head, folder, clock)
        layer = method.start(config, problem)  # an impossible budget ends here: no folder is made
        run_folder.open_run(folder, settings, resume=resume or head is None)
        with clock.phase("measuring"):
            start = reachable(config, problem, method, layer)
        with clock.phase("teacher"):
            data = make_data(config, problem, layer, training, rows.chosen, folder, normalisers)
        with clock.phase("learning"):
            learned = method.learn(config, problem, layer, data, folder, resume=resume)
        with clock.phase("measuring"):
            summary = summarize(config, problem, learned, start, rows.on)
        save(folder, problem, learned)
        summary |= clock.figures()
        write_json(folder / run_folder.SUMMARY, summary)
    except KeyboardInterrupt:
        if (folder / run_folder.CONFIG).exists() and config.objective == "fidelity":
            say(
                f"Stopped; {folder} keeps the settings alone, since learning takes minutes: the"
                " same command with --resume begins it anew."
            )
        raise
    finally:
        if (folder / run_folder.CONFIG).exists():  # a run that is broken off goes on with its clock
            write_json(folder / PHASES, clock.spent)
    return summary


# --- rows -------------------------------------------------------------------------------------


class SplitRows(NamedTuple):
    chosen: Tensor | None  # numbers of the training rows to learn from; None: all
    measured: Vectors  # of these ...
    aside: held_out.HeldOutRows  # ... the rows that are not learned from
    on: str  # what they are called


def split_rows(config: VectorsConfig, training: Vectors, valid: Vectors | None) -> SplitRows:
    """The user's validation rows are measured on; without any, some training rows put aside."""
    if valid is not None:
        aside = held_out.in_halves(len(valid.labels))
        chosen = chosen_rows(config, np.arange(len(training.labels)))
        everything = chosen if len(chosen) < len(training.labels) else None
        return SplitRows(everything, valid, aside, "validation vectors")
    kept, aside = held_out.put_aside(len(training.labels))
    return SplitRows(chosen_rows(config, kept), training, aside, "held-out vectors")


def chosen_rows(config: VectorsConfig, kept: NDArray[np.int64]) -> Tensor:
    """Of the rows that are kept for it, those to learn from: at random, if not all are wanted."""
    if config.train_rows is None or config.train_rows >= len(kept):
        return torch.from_numpy(kept)
    some = sample(len(kept), config.train_rows, config.seed + 2).sort().values
    return torch.from_numpy(kept)[some]


def of_chosen(values: Tensor, chosen: Tensor | None) -> Tensor:
    return values if chosen is None else values[chosen]


def make_problem(
    config: VectorsConfig,
    rows: SplitRows,
    training: Vectors,
    valid: Vectors | None,
    head: Head | None,
    folder: Path,
    clock: Phases,
) -> Problem:
    n_classes = count_classes(training, valid) if head is None else len(head.weight)
    budget = mean_rows_allowed(config, n_classes)
    with clock.phase("reading"):
        inputs = MappedRows(training.hidden, chosen=rows.chosen)
        labels = of_chosen(torch.from_numpy(training.labels.astype(np.int64)), rows.chosen)  # [M]
        wanted = rows_to_sample(config, n_classes, training.hidden.shape[1])
        sampled = sample(len(labels), wanted, config.seed)
        hidden = inputs[sampled]  # [S,D]
    if head is None:
        with clock.phase("full softmax"):
            weight = fitted_head(
                config, inputs, labels, n_classes, folder / run_folder.LEARNED_HEAD
            )  # [N,D]
    else:
        weight = run_folder.full_matrix(head)
    choice, report = (
        HeldOut(
            MappedRows(rows.measured.hidden)[torch.from_numpy(numbers)],
            torch.from_numpy(rows.measured.labels[numbers].astype(np.int64)),
            weight,
        )
        for numbers in (rows.aside.choice, rows.aside.report)
    )
    return Problem(
        inputs,
        labels,
        weight,
        sampled=sampled,
        hidden=hidden,
        budget=budget,
        choice=choice,
        report=report,
        clock=clock,
    )


def rows_to_sample(config: VectorsConfig, n_classes: int, hidden_size: int) -> int:
    bounds = MOST_SCORES[config.objective] // n_classes, MOST_NUMBERS // hidden_size
    return max(1, min(config.sample_rows, *bounds))


def count_classes(training: Vectors, valid: Vectors | None) -> int:
    """N, where only labels tell it."""
    return 1 + max(int(found.labels.max()) for found in (training, valid) if found is not None)


# --- before and after learning ----------------------------------------------------------------


def reachable(
    config: VectorsConfig, problem: Problem, method: Method, start: DSSoftmax
) -> dict[str, Any]:
    """Say what the layer can reach at best, before the long part; returns the start's figures."""
    if not method.within_budget:
        return {}
    figures = start_figures(problem, start)
    shares = figures["reachable"]
    words = (
        f"The experts hold the full softmax's first class for {100 * shares['1']:.1f}% of held-out"
        f" rows, and {100 * shares['10']:.1f}% of its first ten: more cannot be kept"
    )
    if shares["1"] < KEPT and method.allowance is not None:
        needed = method.allowance(config, problem, start)
        if needed is None:
            words += f", and with these rows no budget holds {100 * KEPT:.0f}%"
        else:
            possible = problem.n_classes / (needed + config.n_experts)
            figures["speedup_for_99"] = possible
            words += f"; {speedup(possible)} would hold {100 * KEPT:.0f}%"
    say(f"{words}.")
    return figures


def make_data(
    config: VectorsConfig,
    problem: Problem,
    start: DSSoftmax,
    training: Vectors,
    chosen: Tensor | None,
    folder: Path,
    shared: Path | None,
) -> Data:
    """What the loop learns from; with a teacher, also the full softmax's normalisers.

    They are kept in the run; of all rows in a file that other runs share, if there is one.
    """
    inputs, labels, head = problem.inputs, problem.labels, problem.head
    if not config.distil or config.objective == "fidelity":
        return Data(inputs, labels)
    if shared is not None:
        found = full_normalisers(MappedRows(training.hidden), len(training.labels), head, shared)
        logsumexp = of_chosen(found, chosen)
    elif problem.n_classes > MANY_CLASSES and len(start.keys) < start.n_experts * len(head):
        logsumexp = estimated_normalisers(inputs, len(labels), head, start, config.seed)
    else:
        logsumexp = full_normalisers(inputs, len(labels), head, folder / NORMALISERS)
    return Data(inputs, labels, head=head, logsumexp=logsumexp)


def save(folder: Path, problem: Problem, learned: Learned) -> None:
    if learned.memory:
        write_growth(folder / run_folder.GROWTH, learned)
    hidden = problem.report.hidden  # [T,D]
    some = torch.linspace(0, len(hidden) - 1, min(PARITY_ROWS, len(hidden))).long()
    run_folder.save_layer(folder, learned.layer, hidden[some].numpy())
    if isinstance(learned.layer, HeadSoftmax):  # no choice was made on these rows
        np.save(folder / run_folder.CALIBRATION, hidden.numpy())


def write_growth(file: Path, learned: Learned) -> None:
    memory = [{"step": step, **now} for step, now in enumerate(learned.memory)]
    write_json(
        file,
        {"peak_memory": learned.peak_memory, "stages": learned.stages, "memory": memory},
    )


def earlier_seconds(folder: Path) -> dict[str, float]:
    file = folder / PHASES
    return json.loads(file.read_text()) if file.exists() else {}


# --- settings ---------------------------------------------------------------------------------


def check_settings(config: VectorsConfig) -> None:
    """Refuse what settings alone show to be impossible."""
    if config.rows is not None and config.speedup is not None:
        raise TwoBudgets("Give a budget as rows or as a speedup, not both.")
    if config.method == "mitosis" and config.n_experts not in mitosis.stages(config.n_experts):
        raise ExpertsNotDoubling(
            f"Mitosis doubles the experts from 2 on, so it cannot end with {config.n_experts}."
        )


def mean_rows_allowed(config: VectorsConfig, n_classes: int) -> float:
    if config.speedup is not None:
        return n_classes / config.speedup - config.n_experts
    return float(n_classes) if config.rows is None else config.rows
