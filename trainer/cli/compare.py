"""`dss compare`: methods side by side. PyTorch is imported when it runs, not for `--help`."""

from pathlib import Path
from typing import Any

import click

from service.terminal import progress
from service.terminal.console import json_option, show_json
from service.terminal.messages import say, teller
from trainer.cli.options import INTERRUPTED, NPY, comparison_options


def parse_bundles(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise click.BadParameter(f"{text!r} is not NAME=PATH.")
        if name in found:
            raise click.BadParameter(f"The name {name!r} is given twice.")
        found[name] = Path(path)
    return found


@click.command()
@click.option("--hidden", type=NPY, required=True, help="Training vectors: .npy [rows, width].")
@click.option("--labels", type=NPY, required=True, help="Their classes: .npy [rows].")
@click.option("--head", type=NPY, required=True, help="The full softmax: .npy [classes, width].")
@click.option("--valid-hidden", type=NPY, required=True, help="Vectors that dials are set on.")
@click.option("--valid-labels", type=NPY, required=True, help="Their classes.")
@click.option("--test-hidden", type=NPY, help="Vectors read once for each reported setting.")
@click.option("--test-labels", type=NPY, help="Their classes.")
@click.option(
    "--bundle",
    "bundles",
    multiple=True,
    callback=parse_bundles,
    metavar="NAME=PATH",
    help="A bundle to compare; may be given again.",
)
@comparison_options
@click.option("--seed", type=int, default=0, show_default=True, help="Of samples and batches.")
@click.option(
    "--work", type=click.Path(path_type=Path), help="What is finished.  [default: beside --out]"
)
@click.option(
    "--out", "output", type=click.Path(path_type=Path), required=True, help="JSON file of figures."
)
@json_option
def compare(
    hidden: Path,
    labels: Path,
    head: Path,
    valid_hidden: Path,
    valid_labels: Path,
    test_hidden: Path | None,
    test_labels: Path | None,
    bundles: dict[str, Path],
    methods: str | None,
    work: Path | None,
    output: Path,
    as_json: bool,
    **settings: Any,
) -> None:
    """Measure bundles beside the methods people use instead.

    All on the same vectors, and every method is swept over its own dial on validation rows. The
    same command goes on where a stopped one was.
    """
    if (test_hidden is None) != (test_labels is None):
        raise click.UsageError("--test-hidden and --test-labels go together.")
    from trainer.data.arrays import open_head, open_vectors
    from trainer.data.files import write_json
    from trainer.evaluation.measure import OutputImpossible

    if output.is_dir() or not output.parent.is_dir():
        raise OutputImpossible(f"{output} cannot be written: it is a folder or lies in none.")
    opened = open_head(head)
    n_classes, hidden_size = opened.weight.shape
    shape = {"n_classes": n_classes, "hidden_size": hidden_size}
    training = open_vectors(hidden, labels, **shape)
    valid = open_vectors(valid_hidden, valid_labels, **shape)
    test = None
    if test_hidden is not None and test_labels is not None:
        test = open_vectors(test_hidden, test_labels, **shape)
    from trainer.baselines.compare import compare as run
    from trainer.baselines.method import Options

    given = {name: value for name, value in settings.items() if value is not None}
    folder = work or output.with_name(f"{output.stem}-work")
    try:
        figures = run(
            training,
            opened,
            valid,
            test,
            folder,
            bundles=bundles,
            methods=None if methods is None else methods.split(","),
            options=Options(**given),
            say=teller(as_json),
        )
    except KeyboardInterrupt:
        progress.stop()
        say(f"Stopped; what is finished is in {folder}: the same command goes on.")
        raise SystemExit(INTERRUPTED) from None
    write_json(output, figures)
    if as_json:
        show_json(figures)
        return
    chosen = sum(point.get("chosen", False) for point in figures["points"])
    click.echo(f"{output}: {len(figures['points'])} points, {chosen} of them chosen")
