"""Prints messages while a command runs, above its progress bars if there are any."""

import sys
from collections.abc import Callable

import click

from service.terminal import console, progress


def say(text: str) -> None:
    """To stderr: it is no part of the result."""
    with progress.hidden():
        click.echo(text, err=True)


def print_line(text: str) -> None:
    """To stdout: a line of a result that is printed while the command runs."""
    with progress.hidden():
        click.echo(text)


def teller(as_json: bool) -> Callable[[str], None]:
    """How such lines are printed; if the result is JSON, they are no part of it."""
    return say if as_json else print_line


def suggest(command: str) -> None:
    """Print the command that usually comes next, if a person is looking."""
    if console.is_terminal(sys.stderr):
        say(click.style(f"Next: {command}", dim=True))
