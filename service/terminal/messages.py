"""What commands tell on the way to their result. Bars, where there are any, make room for it."""

import sys
from collections.abc import Callable

import click

from service.terminal import console, progress


def say(text: str) -> None:
    """To stderr, which is for everything that is no result."""
    with progress.hidden():
        click.echo(text, err=True)


def print_line(text: str) -> None:
    """A line of a result that comes bit by bit."""
    with progress.hidden():
        click.echo(text)


def teller(as_json: bool) -> Callable[[str], None]:
    """How such lines are told: where JSON will be the result, they are none."""
    return say if as_json else print_line


def suggest(command: str) -> None:
    """What comes next in the story, for whoever looks on."""
    if console.is_terminal(sys.stderr):
        say(click.style(f"Next: {command}", dim=True))
