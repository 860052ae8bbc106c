"""`dss export`: a bundle from a run. PyTorch is imported when it runs, not for `--help`."""

from pathlib import Path
from typing import Literal

import click

from service.terminal.console import json_option, show_json
from service.terminal.messages import say, suggest
from trainer.cli.capture_option import capture_option
from trainer.cli.results import export_facts


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--labels", type=click.Path(path_type=Path), help="One class name a line.")
@click.option("--svd-window", type=click.IntRange(min=1), help="Preview large experts: directions.")
@click.option(
    "--svd-share",
    type=click.FloatRange(0, 1, min_open=True),
    help="Which share of a previewed expert's classes is scored exactly.",
)
@click.option(
    "--svd-above",
    type=click.IntRange(min=0),
    default=1000,
    show_default=True,
    help="Preview experts of more classes than this.",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "int8"]),
    default="fp32",
    show_default=True,
    help="How experts are stored; int8 scores all classes roughly and the best exactly.",
)
@capture_option("head", "bias")
@click.option(
    "--head",
    type=click.Path(path_type=Path),
    help="The full softmax's matrix (.npy), shipped so that a server can compare its answers.",
)
@click.option("--bias", type=click.Path(path_type=Path), help="The head's bias, if it has one.")
@click.option(
    "--calibrate",
    type=click.Path(path_type=Path),
    help="Rows (.npy) that training did not see, for promises of recall; by default the run's own.",
)
@json_option
def export(
    run: Path,
    destination: Path,
    labels: Path | None,
    svd_window: int | None,
    svd_share: float | None,
    svd_above: int,
    precision: Literal["fp32", "fp16", "int8"],
    head: Path | None,
    bias: Path | None,
    calibrate: Path | None,
    as_json: bool,
) -> None:
    """Turn a finished RUN into a checked bundle at DESTINATION.

    A server finds it there if DESTINATION is models/NAME/1, or 2 and so on for later versions.

    With --svd-window and --svd-share large experts are approximated by SVD-softmax.
    """
    from trainer.data.arrays import open_head, open_rows
    from trainer.export.calibration import too_few_for, words_on_rows
    from trainer.export.export import export as export_run
    from trainer.export.export import words_on_approximation
    from trainer.export.svd_softmax import Approximation

    if (svd_window is None) != (svd_share is None):
        raise click.UsageError("--svd-window and --svd-share go together.")
    approximation = None
    if svd_window is not None and svd_share is not None:
        approximation = Approximation(svd_window, svd_share, svd_above)
    if approximation is not None and precision != "fp32":
        raise click.UsageError("--svd-window goes with --precision fp32 only.")
    if bias is not None and head is None:
        raise click.UsageError("--bias goes with --head.")
    shipped = None if head is None else open_head(head, bias)
    rows = None if calibrate is None else open_rows(calibrate)
    written = export_run(run, destination, labels, approximation, precision, shipped, rows)
    if as_json:
        show_json(export_facts(written, destination))
        return
    manifest = written.manifest
    size = sum(entry.bytes for entry in manifest.files.values())
    layer = "approximated layer" if any(written.previews) else "layer"
    equal = {
        "fp32": f"equal the {layer}'s",
        "fp16": "equal the layer's with weights rounded to float16",
        "int8": "name the layer's classes in at least 99.9% of the rows",
    }[precision]
    click.echo(
        f"{destination}: {manifest.n_classes} classes in {manifest.n_experts} experts,"
        f" {size / 1e6:.1f} MB; the service's answers {equal}"
    )
    few = [] if manifest.contract is None else too_few_for(manifest.contract)
    if few:
        say(
            "The calibration has too few rows for some promises, which are kept by exact answers"
            f" alone: {words_on_rows(few)}."
        )
    if approximation is not None:
        click.echo(words_on_approximation(written, approximation))
    suggest(f"dss serve --models {destination.parent.parent}")
