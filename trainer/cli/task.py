"""`dss task`: whole experiments. PyTorch is imported when a command runs, not for `--help`."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from service.terminal import progress
from service.terminal.console import json_option, show_json
from service.terminal.messages import say, teller
from trainer.cli.options import INTERRUPTED, comparison_options
from trainer.cli.task_head import head

if TYPE_CHECKING:
    from trainer.tasks.language_model.plan import Plan


@click.group()
def task() -> None:
    """Run a whole experiment of the paper, or get a real model's head."""


task.add_command(head)


@task.command("language-model")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    envvar="DSS_DATA",
    show_envvar=True,
    required=True,
    help="Folder of ptb.{train,valid,test}.txt or wiki.{train,valid,test}.tokens.",
)
@click.option(
    "--encoder",
    type=click.Path(path_type=Path),
    help="A trained word model (.npz); without it one is trained.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Run folder.")
@click.option("--resume", is_flag=True, help="Go on with the run in --out.")
@click.option("--epochs", type=int, help="Of the encoder's training.")
@click.option("--seed", type=int, help="Of initial weights and dropout.")
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="TOML file with settings of the encoder's training that differ from the defaults.",
)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="One such setting.")
@click.option(
    "--until",
    type=click.Choice(["hidden", "layers", "tables"]),
    default="tables",
    show_default=True,
    help="Stop after the hidden vectors, or after the layers of the plan (no test word is read"
    " for them), or compare and report as well.",
)
@click.option(
    "--plan",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="TOML file with the layers to train.  [default: those of the paper's tables]",
)
@comparison_options
@json_option
def language_model(
    data: Path,
    encoder: Path | None,
    out: Path,
    resume: bool,
    epochs: int | None,
    seed: int | None,
    config: Path | None,
    settings: tuple[str, ...],
    until: str,
    plan: Path | None,
    methods: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict the next word: the paper's tables, from the text on.

    Takes or trains an LSTM, writes its hidden vectors to OUT/hidden, trains the layers of the
    plan, compares them with every other method, and writes OUT/results.json and OUT/report.
    """
    from trainer.tasks.language_model import tables
    from trainer.tasks.language_model import task as lm
    from trainer.tasks.language_model.encoder_training import EncoderConfig
    from trainer.tasks.language_model.plan import read_plan
    from trainer.training.config import make_config, parse_setting, read_toml
    from trainer.training.loop import Interrupted

    chosen = make_config(
        EncoderConfig,
        read_toml(config) if config else {},
        *(parse_setting(text) for text in settings),
        {} if epochs is None else {"epochs": epochs},
        {} if seed is None else {"seed": seed},
    )
    planned = None if plan is None else read_plan(plan)
    tell = teller(as_json)
    try:
        results = figures = lm.run(data, chosen, out, encoder_file=encoder, resume=resume)
        test = figures["test"]
        at = " / ".join(f"{share:.4f}" for share in test["accuracy"].values())
        tell(
            f"{out}: {figures['n_classes']} classes; full softmax on the test words:"
            f" perplexity {test['perplexity']:.1f}, accuracy at 1/5/10 {at}"
        )
        layers = read_plan(tables.preset(figures["corpus"])) if planned is None else planned
        if until == "layers":
            tables.train_layers(out, layers, threads=chosen.threads, say=tell)
        if until == "tables":
            results = _tables(out, layers, methods, chosen.threads, options, tell)
    except Interrupted as interruption:
        say(str(interruption))
        raise SystemExit(INTERRUPTED) from None
    except KeyboardInterrupt:
        progress.stop()
        say(f"Stopped; what is finished is in {out}: the same command with --resume goes on.")
        raise SystemExit(INTERRUPTED) from None
    if as_json:
        show_json({"run": str(out), **results})


def _tables(
    out: Path,
    plan: "Plan",
    methods: str | None,
    threads: int | None,
    options: dict[str, Any],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    from trainer.baselines.method import Options
    from trainer.report import report
    from trainer.tasks.language_model import tables

    results = tables.run(
        out,
        plan,
        Options(**{name: value for name, value in options.items() if value is not None}),
        threads=threads,
        methods=None if methods is None else methods.split(","),
        say=tell,
    )
    page = out / "report"
    report.write([out], page, shlex.join(["dss", "report", str(out), "--out", str(page)]))
    tell(f"{page / report.PAGE}: the tables and figures")
    return results
