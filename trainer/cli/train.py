"""`dss train`: learns a layer. PyTorch is imported when it runs, not for `--help`."""

from pathlib import Path
from typing import Any

import click

from service.terminal.console import json_option
from service.terminal.messages import suggest
from trainer.cli.capture_option import FILES, capture_option
from trainer.cli.options import INTERRUPTED, NPY
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
@click.option("--valid-hidden", type=NPY, help="Vectors to report accuracy on.")
@click.option("--valid-labels", type=NPY, help="Their classes.")
@click.option("--experts", type=int, help="How many experts.  [default: 64]")
@click.option(
    "--method",
    type=click.Choice(["warm", "mitosis", "dense"]),
    help="How a layer is learned from vectors.  [default: warm]",
)
@click.option("--speedup", type=float, help="Budget: how many times fewer FLOPs.")
@click.option("--rows", type=float, help="Budget: classes scored per answer, on average.")
@click.option("--keep-one/--no-keep-one", default=None, help="A copy of every class?")
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
            _train_synthetic(differences, **options)
        else:
            _train_vectors(differences, hidden, **options)
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
    summary = synthetic.run(parsed, chosen, folder, resume=resume, baseline=baseline)
    show_training(folder, summary, as_json)
    suggest(f"dss export {folder} models/NAME/1")


def _train_vectors(
    differences: list[dict[str, Any]],
    hidden: Path,
    *,
    labels: Path | None,
    head: Path | None,
    bias: Path | None,
    method: str | None,
    valid_hidden: Path | None,
    valid_labels: Path | None,
    speedup: float | None,
    rows: float | None,
    out: Path | None,
    resume: bool,
    as_json: bool,
    **_: object,
) -> None:
    from trainer.data.arrays import open_head, open_vectors
    from trainer.training import from_vectors
    from trainer.training.config import METHOD_DEFAULTS, VectorsConfig, make_config

    if labels is None:
        raise click.UsageError("--hidden needs --labels.")
    if bias is not None and head is None:
        raise click.UsageError("--bias needs --head.")
    if (valid_hidden is None) != (valid_labels is None):
        raise click.UsageError("--valid-hidden and --valid-labels go together.")
    method = method or next((d["method"] for d in reversed(differences) if "method" in d), "warm")
    chosen = make_config(
        VectorsConfig,
        METHOD_DEFAULTS.get(method, {}),
        *differences,
        {"method": method, "speedup": speedup, "rows": rows},
    )
    opened = None if head is None else open_head(head, bias)
    n_classes, hidden_size = (None, None) if opened is None else opened.weight.shape
    training = open_vectors(hidden, labels, n_classes=n_classes, hidden_size=hidden_size)
    hidden_size = training.hidden.shape[1]
    valid = None
    if valid_hidden is not None and valid_labels is not None:
        valid = open_vectors(
            valid_hidden, valid_labels, n_classes=n_classes, hidden_size=hidden_size
        )
    given = {"hidden": hidden, "labels": labels, "head": head, "bias": bias}
    files = {name: str(path) for name, path in given.items() if path is not None}
    folder = out or Path("runs") / f"{hidden.stem}-{chosen.seed}"
    summary = from_vectors.run(chosen, files, training, valid, opened, folder, resume=resume)
    show_training(folder, summary, as_json)
    if summary["mean_rows"] > OVER_BUDGET * summary["rows_asked"]:
        click.echo(
            f"This is over the budget of {summary['rows_asked']:.1f} classes per answer:"
            " train for more epochs, or allow more.",
            err=True,
        )
    suggest(f"dss export {folder} models/NAME/1")
