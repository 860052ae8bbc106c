"""`dss train`: learns a layer. PyTorch is imported when it runs, not for `--help`."""

from pathlib import Path
from typing import Any

import click

from service.terminal.console import json_option
from service.terminal.messages import say, suggest
from service.terminal.phases import Phases
from trainer.cli.capture_option import FILES, capture_option
from trainer.cli.options import INTERRUPTED, NOT_MET, NPY
from trainer.cli.results import show_training

OVER_BUDGET = 1.05  # held-out rows go to other experts than training rows, a little


@click.command()
@click.option("--task", type=click.Choice(["synthetic"]), help="One of the paper's experiments.")
@click.option("--size", default="10x10", show_default=True, help="Super-clusters x sub-clusters.")
@capture_option(*FILES)
@click.option("--hidden", type=NPY, help="Vectors of your own: .npy [rows, width], fp32 or fp16.")
@click.option("--labels", type=NPY, help="Their classes: .npy [rows].")
@click.option("--head", type=NPY, help="The trained output layer: .npy [classes, width].")
@click.option("--bias", type=NPY, help="Its bias: .npy [classes].")
@click.option(
    "--valid-hidden",
    type=NPY,
    help="Vectors to measure on.  [default: some of --hidden, which are not learned from]",
)
@click.option("--valid-labels", type=NPY, help="Their classes.")
@click.option(
    "--objective",
    type=click.Choice(["fidelity", "accuracy"]),
    help="Keep the head's own answers, or learn from labels too.  [default: fidelity with --head,"
    " accuracy without or with --method]",
)
@click.option("--experts", type=int, help="How many experts.  [default: 64]")
@click.option(
    "--method",
    type=click.Choice(["warm", "mitosis", "dense"]),
    help="How a layer is learned from vectors.  [default: warm]",
)
@click.option("--speedup", type=float, help="Budget: how many times fewer FLOPs.")
@click.option("--rows", type=float, help="Budget: classes scored per answer, on average.")
@click.option("--keep-one/--no-keep-one", default=None, help="A copy of every class?")
@click.option(
    "--require-precision",
    type=click.FloatRange(0, 1),
    help="Exit status 3 if fewer of the first answers are the full softmax's.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Run folder.  [default: in runs/]")
@click.option("--seed", type=int, help="Of data, initial weights and batches.")
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="TOML file with settings that differ from the task's own.",
)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="One such setting.")
@click.option(
    "--ablate",
    type=click.Choice(["lasso", "expert-lasso", "both-lassos", "balance"]),
    help="Leave a term out of the objective.",
)
@click.option("--resume", is_flag=True, help="Go on with the run in --out.")
@click.option("--baseline/--no-baseline", default=True, help="Also train a full softmax.")
@json_option
def train(
    task: str | None,
    hidden: Path | None,
    config: Path | None,
    settings: tuple[str, ...],
    seed: int | None,
    experts: int | None,
    keep_one: bool | None,
    **options: Any,
) -> None:
    """Train a doubly sparse layer and write a run folder.

    Either on one of the paper's experiments (--task) or on vectors of your own: those of a folder
    that trainer.capture wrote (--capture), or those of --hidden and --labels with the output layer
    of --head; without that a full softmax is learned from the labels first.
    """
    if (task is None) == (hidden is None):
        raise click.UsageError("Give one of --task, --capture and --hidden.")
    if hidden is None and options["require_precision"] is not None:
        raise click.UsageError("--require-precision goes with vectors of your own.")
    clock = Phases()
    from trainer.training.config import parse_setting, read_toml
    from trainer.training.loop import Interrupted

    flags = {"seed": seed, "n_experts": experts, "keep_one": keep_one}
    differences = [
        read_toml(config) if config else {},
        *(parse_setting(text) for text in settings),
        {name: value for name, value in flags.items() if value is not None},
    ]
    try:
        if hidden is None:
            _train_synthetic(differences, clock=clock, **options)
        else:
            _train_vectors(differences, hidden, clock=clock, **options)
    except Interrupted as interruption:
        click.echo(str(interruption), err=True)
        raise SystemExit(INTERRUPTED) from None


def _train_synthetic(
    differences: list[dict[str, Any]],
    *,
    size: str,
    ablate: str | None,
    out: Path | None,
    resume: bool,
    baseline: bool,
    as_json: bool,
    clock: Phases,
    **_: object,
) -> None:
    from trainer.tasks import synthetic
    from trainer.training.config import make_config

    parsed = synthetic.parse_size(size)
    ablation = synthetic.ABLATIONS[ablate] if ablate else {}
    chosen = make_config(
        synthetic.SyntheticConfig, synthetic.preset(parsed), ablation, *differences
    )
    name = f"synthetic-{size}-{chosen.seed}" + (f"-no-{ablate}" if ablate else "")
    folder = out or Path("runs") / name
    summary = synthetic.run(parsed, chosen, folder, resume=resume, baseline=baseline, clock=clock)
    show_training(folder, summary, as_json)
    suggest(f"dss export {folder} models/NAME/1")


def _train_vectors(
    differences: list[dict[str, Any]],
    hidden: Path,
    *,
    labels: Path | None,
    head: Path | None,
    bias: Path | None,
    objective: str | None,
    method: str | None,
    valid_hidden: Path | None,
    valid_labels: Path | None,
    speedup: float | None,
    rows: float | None,
    require_precision: float | None,
    out: Path | None,
    resume: bool,
    as_json: bool,
    clock: Phases,
    **_: object,
) -> None:
    from trainer.data.arrays import open_head, open_vectors
    from trainer.training import from_vectors
    from trainer.training.config import (
        FIDELITY_DEFAULTS,
        MANY_CLASSES,
        MANY_CLASSES_DEFAULTS,
        METHOD_DEFAULTS,
        VectorsConfig,
        make_config,
    )

    if labels is None:
        raise click.UsageError("--hidden needs --labels.")
    if bias is not None and head is None:
        raise click.UsageError("--bias needs --head.")
    if (valid_hidden is None) != (valid_labels is None):
        raise click.UsageError("--valid-hidden and --valid-labels go together.")
    method = method or _setting(differences, "method")
    objective = objective or _setting(differences, "objective")
    if objective == "fidelity" and method is not None:
        raise click.UsageError("--method goes with --objective accuracy.")
    if objective == "fidelity" and head is None:
        raise click.UsageError("--objective fidelity needs --head: there are no answers to keep.")
    if objective is None:
        objective = "accuracy" if head is None or method is not None else "fidelity"
    method = method or "warm"
    given = {"objective": objective, "method": method, "speedup": speedup, "rows": rows}
    defaults = FIDELITY_DEFAULTS if objective == "fidelity" else METHOD_DEFAULTS[method]
    chosen = make_config(VectorsConfig, defaults, *differences, given)
    from_vectors.check_settings(chosen)
    with clock.phase("reading"):
        opened = None if head is None else open_head(head, bias)
        n_classes, hidden_size = (None, None) if opened is None else opened.weight.shape
        training = open_vectors(hidden, labels, n_classes=n_classes, hidden_size=hidden_size)
        hidden_size = training.hidden.shape[1]
        valid = None
        if valid_hidden is not None and valid_labels is not None:
            valid = open_vectors(
                valid_hidden, valid_labels, n_classes=n_classes, hidden_size=hidden_size
            )
    if (objective, method) == ("accuracy", "warm") and (n_classes or 0) > MANY_CLASSES:
        chosen = make_config(VectorsConfig, MANY_CLASSES_DEFAULTS, *differences, given)
    paths = {"hidden": hidden, "labels": labels, "head": head, "bias": bias}
    files = {name: str(path) for name, path in paths.items() if path is not None}
    folder = out or Path("runs") / f"{hidden.stem}-{chosen.seed}"
    summary = from_vectors.run(
        chosen, files, training, valid, opened, folder, resume=resume, clock=clock
    )
    show_training(folder, summary, as_json)
    for warning in warnings(summary):
        say(warning)
    if require_precision is not None and summary["precision"]["1"] < require_precision:
        say(
            f"The precision is {summary['precision']['1']:.4f} and {require_precision:g} was"
            f" required; the run in {folder} is complete."
        )
        raise SystemExit(NOT_MET)
    suggest(f"dss export {folder} models/NAME/1")


def _setting(differences: list[dict[str, Any]], name: str) -> str | None:
    """A setting of the --config file or of --set, the last one winning."""
    return next((found[name] for found in reversed(differences) if name in found), None)


def warnings(summary: dict[str, Any]) -> list[str]:
    from trainer.training.verdict import balance_warning

    found = [balance_warning(summary)]
    if summary["mean_rows"] > OVER_BUDGET * summary["rows_asked"]:
        found.append(
            f"This is over the budget of {summary['rows_asked']:.1f} classes per answer:"
            " train for more epochs, or allow more."
        )
    return [warning for warning in found if warning is not None]
