"""What several commands share: options, their types, and an exit status."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

NOT_MET = 3  # the exit status if a figure that was required is not reached
INTERRUPTED = 130  # ... and after Ctrl-C
COUNT = click.IntRange(min=1)
NPY = click.Path(path_type=Path)

COMPARISON = (
    click.option("--methods", help="Some of the methods, with commas between.  [default: all]"),
    click.option(
        "--rows", type=COUNT, default=20_000, show_default=True, help="Validation rows used."
    ),
    click.option("--latency/--no-latency", default=True, help="Take the time of single rows?"),
    click.option(
        "--retrain-epochs", type=COUNT, help="Of each round of full-retrained.  [default: 5]"
    ),
    click.option("--retrain-rows", type=COUNT, help="Training rows it sees.  [default: all]"),
    click.option("--train-epochs", type=COUNT, help="Of d-softmax and adaptive.  [default: 2]"),
    click.option("--train-rows", type=COUNT, help="Training rows they see.  [default: all]"),
)


def comparison_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How methods are compared: which, on how many rows, trained for how long."""
    for option in reversed(COMPARISON):
        command = option(command)
    return command
