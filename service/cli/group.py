"""The group of all commands: finds them, lists them in help, and prints their failures.

Some need torch, which a serving install does not have. So commands of other packages are entry
points of the group `dss.commands`, imported only when one runs or help lists it.
"""

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import IO, Any

import click

from service.errors import DSSError
from service.terminal import console, progress
from service.terminal.text import printable

ENTRY_POINTS = "dss.commands"
EXTRA = "doubly-sparse-softmax[train]"
INTERRUPTED = 130

START = (
    "dss train --capture captured --experts 64 --speedup 20 --out run",
    "dss export run models/own/1",
    "dss serve --models models",
)
SECTIONS = {
    "Commands": (
        *("train", "export", "verify", "sign", "inspect", "evaluate", "report"),
        *("serve", "query", "bench"),
    ),
    "Research": ("compare", "task"),
    "Operating": ("keys", "completion"),
}
OTHERS = "More"
LISTED = tuple(name for names in SECTIONS.values() for name in names)


class Failed(click.ClickException):
    def show(self, file: IO[Any] | None = None) -> None:
        _print_error(self.format_message(), file)


class Misused(click.UsageError):
    """One sentence, then the usage."""

    def show(self, file: IO[Any] | None = None) -> None:
        _print_error(self.format_message(), file)
        if self.ctx is not None:
            usage = self.ctx.get_usage()
            more = f"{self.ctx.command_path} --help says more."
            click.echo(f"{usage}\n{more}", file, err=True, color=self.ctx.color)


class Interrupted(click.ClickException):
    exit_code = INTERRUPTED

    def show(self, file: IO[Any] | None = None) -> None:
        if sys.stderr.isatty():
            click.echo("", file, err=True)  # after the ^C that a terminal shows
        click.echo(self.message, file, err=True)


class HelpFormatter(click.HelpFormatter):
    """Help in colours; where there is no terminal to show them, click removes them again."""

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
    formatter_class = HelpFormatter


class CommandGroup(click.Group):
    """Finds more commands by entry point, and prints named failures as one sentence."""

    context_class = Context

    def list_commands(self, ctx: click.Context) -> list[str]:
        found = {*super().list_commands(ctx), *_entry_points(ctx)}
        listed = [name for name in LISTED if name in found]
        return listed + sorted(found.difference(listed))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return _with_help(own)
        entry_point = _entry_points(ctx).get(cmd_name)
        if entry_point is None:
            return None
        try:
            command: click.Command = entry_point.load()
        except ImportError as error:
            return _missing(cmd_name, error.name)
        return _with_help(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchOption:
            raise
        except click.UsageError as error:
            close = get_close_matches(args[0], self.list_commands(ctx))
            raise click.UsageError(_unknown("command", args[0], close), ctx) from error

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        extra.setdefault("color", console.colour_choice())
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise _shown(error, info_name) from error

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except (click.UsageError, DSSError, ModuleNotFoundError, KeyboardInterrupt) as error:
            raise _shown(error, ctx.invoked_subcommand) from error
        finally:
            progress.stop()

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        with formatter.section("From a model to a served layer"):
            for line in START:
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands first, then the options that all of them have."""
        self.format_commands(ctx, formatter)
        click.Command.format_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        others = tuple(name for name in found if name not in LISTED)
        width = max(map(len, found))
        for title, names in {**SECTIONS, OTHERS: others}.items():
            lines = [
                (f"{name:<{width}}", command.get_short_help_str(formatter.width - width - 4))
                for name in names
                if (command := found.get(name)) is not None
            ]
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)


def _with_help(command: click.Command) -> click.Command:
    """The command and its subcommands, with this help."""
    command.context_class = Context
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _with_help(inner)
    return command


def _shown(error: BaseException, command: str | None) -> click.ClickException:
    """The failure as it is printed: one sentence, and an exit status for its kind."""
    if isinstance(error, click.NoSuchOption):
        close = error.possibilities or []
        return Misused(_unknown("option", error.option_name, close), error.ctx)
    if isinstance(error, click.UsageError):
        return Misused(error.format_message(), error.ctx)
    if isinstance(error, ModuleNotFoundError):
        return Failed(_needs(command, error.name))
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(f"Interrupted: dss {command} did not finish.")
    return Failed(printable(str(error)))  # it may quote a bundle or a server


def _unknown(kind: str, name: str, close: list[str]) -> str:
    """`close` are similar names, the closest first."""
    instead = f" Did you mean {close[0]!r}?" if close else ""
    return f"There is no {kind} {name!r}.{instead}"


def _print_error(message: str, file: IO[Any] | None) -> None:
    ended = message if message.endswith((".", "?")) else f"{message}."
    error = click.style("Error:", fg="red", bold=True)
    click.echo(f"{error} {ended}", file, err=True, color=console.colour_choice())


def _entry_points(ctx: click.Context) -> dict[str, EntryPoint]:
    """Found once: it takes reading the metadata of all installed packages."""
    found: dict[str, EntryPoint] = ctx.meta.setdefault(ENTRY_POINTS, {})
    if not found:
        found.update({entry.name: entry for entry in entry_points(group=ENTRY_POINTS)})
    return found


def _needs(command: str | None, module: str | None) -> str:
    return f"dss {command} needs {module or 'a package'}: install {EXTRA}."


def _missing(name: str, module: str | None) -> click.Command:
    """In place of a command that cannot be imported: says what to install."""

    def refuse(**_: object) -> None:
        raise Failed(_needs(name, module))

    return click.Command(
        name,
        callback=refuse,
        short_help=f"(install {EXTRA})",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        add_help_option=False,
    )
