"""Are promises kept? Recall, and exact answers, on rows that nobody has seen.

A bundle answers test rows, which neither training nor calibration has seen, under promises of
recall: how many of the head's k best were missed, and how the rows were answered. Exact answers are
compared class by class with float64 scores of all classes, on test rows, then on validation rows,
then on both with noise added, as many as --rows says. Nothing is timed. Results go to
benchmarks/results/promises.json, one entry for each --title.

    python -m benchmarks.engines.promises --title "Penn Treebank" --capture captured/ptb \
        --bundle models/ptb/1

M rows, B rows at once, D hidden, K experts, N classes, k answers.
"""

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.document import write_part
from benchmarks.engines.__main__ import FILE, FOLDER, RESULTS, installed, keep
from benchmarks.engines.promises import brute_force, report
from benchmarks.engines.timing import Rows
from service import bundle as bundles
from service.bundle import Bundle
from service.engine import Engine
from service.errors import DSSError
from service.system.machine import machine
from service.topk import RUNGS, Mode, TopK
from trainer.baselines.measurement import spread
from trainer.capture.folder import read_capture
from trainer.data.arrays import Head, chunks, open_head, open_rows
from trainer.evaluation.full_scan import rows_at_once

RECALLS = (0.9, 0.99, 0.999)
KS = (1, 10)
BLOCKS = 100  # of neighbouring rows, which are alike: they are drawn together
DRAWS = 10_000
CERTAINTY = 95  # percent
NOISE = 0.1  # of how much each number of a hidden vector differs from row to row
AT_ONCE = 512
SAID_AFTER = 50_000  # rows

Scores = NDArray[np.float64]
Seen = Sequence[NDArray[np.floating[Any]]]


class UnseenRowsMissing(DSSError):
    pass


# --- promised recall ---------------------------------------------------------------------------


def promised(
    bundle: Bundle, engine: Engine, hidden: Rows, best: NDArray[np.int64]
) -> list[dict[str, Any]]:
    """Of rows [M,D], whose head's own answers are best [M,k], for each k and recall."""
    return [
        kept_recall(bundle, engine, hidden, best[:, :k], recall)
        for k in KS
        if k <= best.shape[1]
        for recall in RECALLS
    ]


def kept_recall(
    bundle: Bundle, engine: Engine, hidden: Rows, best: NDArray[np.int64], recall: float
) -> dict[str, Any]:
    k = best.shape[1]
    missed, looked_at, rungs = np.empty(len(hidden)), np.empty(len(hidden)), np.zeros(len(RUNGS))
    for part in chunks(len(hidden), AT_ONCE):
        found = engine.topk(hidden[part], k, mode=Mode(recall=recall))
        missed[part] = 1 - (best[part][:, :, None] == found.classes[:, None, :]).any(2).mean(1)
        looked_at[part] = rows_looked_at(bundle, found)
        rungs += np.bincount(found.rungs, minlength=len(RUNGS))
    least, most = interval(missed)
    return {
        "k": k,
        "recall": recall,
        "missed": round(float(missed.mean()), 7),
        "may_miss": round(1 - recall, 7),
        "interval": [round(least, 7), round(most, 7)],
        "rungs": {name: round(n / len(hidden), 6) for name, n in zip(RUNGS, rungs, strict=True)},
        "cost": round(float(looked_at.mean()) / bundle.manifest.n_classes, 6),
    }


def rows_looked_at(bundle: Bundle, found: TopK) -> Scores:
    """Rows of gate and head that were multiplied with each hidden vector, [B]."""
    manifest, rungs = bundle.manifest, found.rungs
    sizes = np.array(manifest.expert_sizes)
    in_expert = manifest.n_experts + sizes[found.experts]
    scanned = np.where(rungs == RUNGS.index("sparse"), 0, manifest.n_classes)
    return scanned + np.where(rungs == RUNGS.index("exact"), 0, in_expert)


def interval(missed: Scores, seed: int = 0) -> tuple[float, float]:
    """Of the mean of missed [M]: where it lies if blocks of rows are drawn again and again."""
    blocks = np.array_split(missed, min(BLOCKS, len(missed)))
    sums = np.array([block.sum() for block in blocks])
    sizes = np.array([len(block) for block in blocks])
    drawn = np.random.default_rng(seed).integers(len(blocks), size=(DRAWS, len(blocks)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    least, most = np.percentile(means, [(100 - CERTAINTY) / 2, (100 + CERTAINTY) / 2])
    return float(least), float(most)


# --- exact answers -----------------------------------------------------------------------------


def exactness(
    engine: Engine, head: Head, seen: Seen, wanted: int, say: Callable[[str], None]
) -> dict[str, int]:
    """Rows whose exact answer is not, class by class, that of float64 scores of all classes."""
    k = min(KS[-1], len(head.weight))
    checked, differing = 0, 0
    own = sum(map(len, seen))
    for rows in some_rows(seen, wanted, min(AT_ONCE, rows_at_once(len(head.weight)))):
        found = engine.topk(rows, k, mode=Mode(exact=True)).classes
        differing += int((found != brute_force.best(rows, head, k)).any(axis=1).sum())
        checked += len(rows)
        if checked % SAID_AFTER < len(rows):
            say(f"{checked:,} rows, {differing:,} differ")
    return {"k": k, "rows": checked, "with_noise": max(0, checked - own), "differing": differing}


def some_rows(seen: Seen, wanted: int, at_once: int, seed: int = 0) -> Iterator[Rows]:
    """All rows in their order, and if more are wanted the same again with noise."""
    rng = np.random.default_rng(seed)
    for turn in count():
        for part in seen:
            away = NOISE * np.std(part[spread(len(part), 10_000)], axis=0, dtype=np.float64)  # [D]
            for piece in chunks(len(part), at_once):
                rows = np.array(part[piece][:wanted], np.float32)
                wanted -= len(rows)
                if turn:
                    rows = rows + (rng.normal(size=rows.shape) * away).astype(np.float32)
                yield rows
                if not wanted:
                    return


# --- the command -------------------------------------------------------------------------------


def read_rows(
    capture: Path | None, hidden: Path | None, head: Path | None, bias: Path | None
) -> tuple[Head, list[NDArray[np.floating[Any]]]]:
    """The head, unseen rows, and further rows that may have been seen."""
    if capture is None:
        if hidden is None or head is None:
            raise click.UsageError("--capture, or --hidden and --head, are needed.")
        return open_head(head, bias), [open_rows(hidden)]
    if hidden is not None or head is not None or bias is not None:
        raise click.UsageError("--capture names these files already.")
    captured = read_capture(capture)
    if captured.test_hidden is None:
        raise UnseenRowsMissing(
            f"{capture} has no test rows, and promises were calibrated on validation rows: give"
            " rows that neither training nor calibration has seen, with --hidden and --head."
        )
    files = [captured.test_hidden, captured.valid_hidden]
    return open_head(captured.head, captured.bias), [open_rows(file) for file in files if file]


def run(
    path: Path,
    head: Head,
    seen: Seen,
    *,
    rows: int,
    threads: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """`seen` holds the unseen rows first, then those for the exact answers alone."""
    bundle = bundles.read(path, head=True)
    engine = Engine(bundle, threads=threads, backend="compiled")
    for mode in (Mode(exact=True), Mode(recall=RECALLS[0])):
        engine.check(np.zeros((1, head.weight.shape[1]), np.float32), 1, mode=mode)
    places = spread(len(seen[0]), rows)
    hidden = np.array(seen[0][places], np.float32)
    say(f"the head's own answers to {len(hidden):,} test rows")
    k = min(KS[-1], len(head.weight))
    at_once = min(AT_ONCE, rows_at_once(len(head.weight)))
    parts = chunks(len(hidden), at_once)
    best = np.concatenate([brute_force.best(hidden[part], head, k) for part in parts])
    say("promised recall")
    recalls = promised(bundle, engine, hidden, best)
    say("exact answers")
    n_classes, hidden_size = head.weight.shape
    return {
        "command": shlex.join(["python", "-m", "benchmarks.engines.promises", *sys.argv[1:]]),
        "machine": machine(*installed()),
        "n_classes": n_classes,
        "hidden_size": hidden_size,
        "calibrated_on": None if engine.contract is None else engine.contract.rows,
        "rows": len(hidden),
        "recalls": recalls,
        "exact": exactness(engine, head, seen, rows, say),
    }


@click.command()
@click.option("--title", default="promises", show_default=True, help="The entry of the results.")
@click.option("--bundle", "path", type=FOLDER, help="With a head and a calibration.")
@click.option("--capture", type=FOLDER, help="Folder with the head and test rows.")
@click.option(
    "--hidden", type=FILE, help="Rows that nobody has seen, [M,D], in place of --capture."
)
@click.option("--head", type=FILE, help="The full softmax, [N,D].")
@click.option("--bias", type=FILE, help="Its bias, [N].")
@click.option(
    "--rows", default=200_000, show_default=True, help="For exact answers; test rows at most."
)
@click.option("--threads", default=1, show_default=True, help="Of the engine.")
@click.option("--out", type=click.Path(path_type=Path), help="Results of all titles, as JSON.")
@click.option("--document", type=FILE, help="Markdown with promises markers to fill.")
@click.option("--render", is_flag=True, help="Only fill in what was measured before.")
def main(
    title: str,
    path: Path | None,
    capture: Path | None,
    hidden: Path | None,
    head: Path | None,
    bias: Path | None,
    rows: int,
    threads: int,
    out: Path | None,
    document: Path | None,
    render: bool,
) -> None:
    """Count what a bundle misses where it promised recall, or exact answers."""
    out = out or RESULTS / "promises.json"
    try:
        if not render:
            if path is None:
                raise click.UsageError("--bundle is needed.")
            softmax, seen = read_rows(capture, hidden, head, bias)
            found = run(path, softmax, seen, rows=rows, threads=threads, say=click.echo)
            keep(out, title, found)
        runs = json.loads(out.read_text())
        click.echo(report.markdown(runs))
        if document is not None:
            write_part(document, "promises", report.markdown(runs))
    except DSSError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
