"""`--capture FOLDER`: what `trainer.capture` wrote, in place of a path for each file."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

FILES = ("hidden", "labels", "head", "bias", "valid_hidden", "valid_labels")


def capture_option(
    *names: str, held_out: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option, for a command with options of these names, which it fills in.

    With `held_out` the command gets the rows that were put aside, if any were, and a boolean
    `validation_rows` that says so; None without a capture.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def filled_in(capture: Path | None, **options: Any) -> object:
            files = None if capture is None else captured_files(capture, held_out)
            if files is not None:
                fill_in(options, files, names)
            if held_out:
                given = None if files is None else files["valid_hidden"] is not None
                options["validation_rows"] = given
            return command(**options)

        return click.option(
            "--capture",
            type=click.Path(path_type=Path),
            help="A folder of trainer.capture, in place of a path for each file.",
        )(filled_in)

    return decorate


def captured_files(folder: Path, held_out: bool) -> dict[str, Path | None]:
    from trainer.capture.folder import read_capture

    found = read_capture(folder)
    files = {name: getattr(found, name) for name in FILES}
    if held_out and found.valid_rows:
        files |= {"hidden": found.valid_hidden, "labels": found.valid_labels}
    return files


def fill_in(options: dict[str, Any], files: dict[str, Path | None], names: tuple[str, ...]) -> None:
    for name in names:
        path = files[name]
        if path is None:
            continue
        if options[name] is not None:
            flag = name.replace("_", "-")
            raise click.UsageError(f"--capture names a file for --{flag} already.")
        options[name] = path
