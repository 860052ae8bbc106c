"""`dss evaluate`: measures a bundle, without PyTorch."""

from pathlib import Path

import click

from service.terminal.console import json_option
from trainer.cli.capture_option import capture_option
from trainer.cli.results import show_evaluation


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@capture_option("hidden", "labels", "head", "bias", held_out=True)
@click.option("--hidden", type=click.Path(path_type=Path), help="Hidden vectors, rows x d .npy.")
@click.option("--labels", type=click.Path(path_type=Path), help="Their classes, .npy.")
@click.option(
    "--head", type=click.Path(path_type=Path), help="A full softmax's weights, classes x d .npy."
)
@click.option("--bias", type=click.Path(path_type=Path), help="Its bias, .npy.")
@click.option("--experts-searched", type=int, default=1, show_default=True, help="For each row.")
@click.option("--exact", is_flag=True, help="Measure exact answers as well.")
@click.option(
    "--recall",
    "recalls",
    type=click.FloatRange(0, 1, min_open=True),
    multiple=True,
    metavar="SHARE",
    help="Measure answers with this promised recall as well; may be repeated.",
)
@click.option("--out", "output", type=click.Path(path_type=Path), help="Also write JSON there.")
@json_option
def evaluate(
    bundle: Path,
    hidden: Path | None,
    labels: Path | None,
    head: Path | None,
    bias: Path | None,
    experts_searched: int,
    exact: bool,
    recalls: tuple[float, ...],
    output: Path | None,
    as_json: bool,
    validation_rows: bool | None,
) -> None:
    """Measure a BUNDLE on your vectors: accuracy, cost and latency.

    Precision is against the full softmax: of --head, of --capture, or the bundle's own. Of
    --capture only rows are taken that training with it neither learns from nor makes choices on.
    Needs no PyTorch.
    """
    if hidden is None or labels is None:
        raise click.UsageError("Give --capture, or --hidden and --labels.")
    from trainer.evaluation import measure

    figures = measure.evaluate(
        bundle,
        hidden,
        labels,
        head=head,
        bias=bias,
        experts_searched=experts_searched,
        exact=exact,
        recalls=recalls,
        output=output,
        validation_rows=validation_rows,
    )
    show_evaluation(figures, as_json)
