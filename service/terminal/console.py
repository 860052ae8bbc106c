"""Prints results to stdout; everything else goes to stderr.

Only a terminal gets colours and drawings, unless FORCE_COLOR is set; NO_COLOR and TERM=dumb forbid
them. rich is imported only where something is drawn.
"""

import json
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, TextIO

import click

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

DUMB = ("dumb", "unknown")
COLOURS: Final = "standard"  # the terminal's own sixteen, so that they suit its background

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON on stdout, and nothing else."
)


def is_terminal(stream: TextIO) -> bool:
    """Whether it is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") not in DUMB


def colour_choice() -> bool | None:
    """Colours everywhere (True), nowhere (False) or only on terminals (None)."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return False if os.environ.get("TERM") in DUMB else None


def draws() -> bool:
    """Whether results are drawn with colours and bars. Otherwise they are plain, narrow text."""
    return is_terminal(sys.stdout) or colour_choice() is True


def console(stream: TextIO) -> "Console":
    from rich.console import Console

    choice = colour_choice()
    coloured = is_terminal(stream) if choice is None else choice
    return Console(
        file=stream,
        color_system=COLOURS if coloured else None,
        markup=False,
        emoji=False,
        highlight=False,
    )


def show(*parts: "RenderableType") -> None:
    console(sys.stdout).print(*parts, sep="\n")


def facts(pairs: Iterable[tuple[str, str]]) -> "Table":
    """Names and values, in two columns."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(name, value)
    return grid


def show_json(content: Any) -> None:  # noqa: ANN401
    click.echo(json.dumps(content, indent=2))
