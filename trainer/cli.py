"""`dss train` and `dss export`. PyTorch is imported when a command runs, not for `--help`."""

from pathlib import Path

import click

INTERRUPTED = 130


@click.command()
@click.option("--task", type=click.Choice(["synthetic"]), required=True, help="What to learn.")
@click.option("--size", default="10x10", show_default=True, help="Super-clusters x sub-clusters.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Run folder.  [default: runs/TASK-SIZE-SEED]"
)
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
def train(
    task: str,
    size: str,
    out: Path | None,
    seed: int | None,
    config: Path | None,
    settings: tuple[str, ...],
    ablate: str | None,
    resume: bool,
    baseline: bool,
) -> None:
    """Train a doubly sparse layer and write a run folder: layer, picture and summary.json."""
    from trainer.config import make_config, parse_setting, read_toml
    from trainer.tasks import synthetic
    from trainer.train import Interrupted

    parsed = synthetic.parse_size(size)
    chosen = make_config(
        synthetic.SyntheticConfig,
        synthetic.preset(parsed),
        read_toml(config) if config else {},
        synthetic.ABLATIONS[ablate] if ablate else {},
        *(parse_setting(text) for text in settings),
        {} if seed is None else {"seed": seed},
    )
    name = f"{task}-{size}-{chosen.seed}" + (f"-no-{ablate}" if ablate else "")
    folder = out or Path("runs") / name
    try:
        summary = synthetic.run(parsed, chosen, folder, resume=resume, baseline=baseline)
    except Interrupted as interruption:
        click.echo(str(interruption), err=True)
        raise SystemExit(INTERRUPTED) from None
    full = summary["full_accuracy"]
    click.echo(
        f"{folder}: accuracy {summary['accuracy']:.4f}"
        + (f" (full softmax {full:.4f})" if full is not None else "")
        + f", purity {summary['purity']:.4f}, copies {summary['mean_copies']:.3f},"
        f" FLOPs speedup {summary['flops_speedup']:.2f}x in {summary['seconds']:.0f} s"
    )


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--labels", type=click.Path(path_type=Path), help="One class name a line.")
def export(run: Path, destination: Path, labels: Path | None) -> None:
    """Write the bundle of a finished RUN to DESTINATION, e.g. models/NAME/1, and check it."""
    from trainer.export import export as export_run

    written = export_run(run, destination, labels)
    manifest = written.manifest
    size = sum(entry.bytes for entry in manifest.files.values())
    click.echo(
        f"{destination}: {manifest.n_classes} classes in {manifest.n_experts} experts,"
        f" {size / 1e6:.1f} MB; the service's answers equal the layer's"
    )
