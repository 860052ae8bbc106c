"""`dss task`: whole experiments. PyTorch is imported when a command runs, not for `--help`."""

from pathlib import Path

import click

from trainer.cli import INTERRUPTED


@click.group()
def task() -> None:
    """Run a whole experiment of the paper."""


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
def language_model(
    data: Path,
    encoder: Path | None,
    out: Path,
    resume: bool,
    epochs: int | None,
    seed: int | None,
    config: Path | None,
    settings: tuple[str, ...],
) -> None:
    """Predict the next word: take or train an LSTM and write its hidden vectors to OUT/hidden."""
    from trainer.config import make_config, parse_setting, read_toml
    from trainer.encoder_train import EncoderConfig
    from trainer.tasks import language_model as lm
    from trainer.train import Interrupted

    chosen = make_config(
        EncoderConfig,
        read_toml(config) if config else {},
        *(parse_setting(text) for text in settings),
        {} if epochs is None else {"epochs": epochs},
        {} if seed is None else {"seed": seed},
    )
    try:
        figures = lm.run(data, chosen, out, encoder_file=encoder, resume=resume)
    except Interrupted as interruption:
        click.echo(str(interruption), err=True)
        raise SystemExit(INTERRUPTED) from None
    test = figures["test"]
    at = " / ".join(f"{share:.4f}" for share in test["accuracy"].values())
    click.echo(
        f"{out}: {figures['n_classes']} classes; full softmax on the test words:"
        f" perplexity {test['perplexity']:.1f}, accuracy at 1/5/10 {at}"
    )
