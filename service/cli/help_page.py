"""Help in colours, where there is a terminal to show them; elsewhere click takes them out again."""

from collections.abc import Iterable

import click


class Formatter(click.HelpFormatter):
    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(prog, args, prefix or f"{click.style('Usage:', bold=True)} ")

    def write_heading(self, heading: str) -> None:
        super().write_heading(click.style(heading, bold=True))

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        coloured = [(click.style(first, fg="cyan"), second) for first, second in rows]
        super().write_dl(coloured, col_max, col_spacing)


class Context(click.Context):
    formatter_class = Formatter


def dressed(command: click.Command) -> click.Command:
    """The command, and those under it, with this help."""
    command.context_class = Context
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            dressed(inner)
    return command
