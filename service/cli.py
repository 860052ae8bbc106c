"""The command `dss`. Serving commands live here; others are found as `dss.commands` entry points.

Training commands need torch, which a serving install does not have, so an entry point is imported
only when its command runs or help lists it.
"""

import json
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import click

from service.errors import DSSError

ENTRY_POINTS = "dss.commands"
EXTRA = "doubly-sparse-softmax[train]"


class Commands(click.Group):
    """A group that finds more commands by entry point, and says named failures in one sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_entry_points()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        entry_point = _entry_points().get(cmd_name)
        if entry_point is None:
            return None
        try:
            command: click.Command = entry_point.load()
        except ImportError as error:
            return _missing(cmd_name, error.name)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except DSSError as error:
            raise click.ClickException(str(error)) from error
        except ModuleNotFoundError as error:
            raise click.ClickException(_needs(ctx.invoked_subcommand, error.name)) from error


def _entry_points() -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=ENTRY_POINTS)}


def _needs(command: str | None, module: str | None) -> str:
    return f"dss {command} needs {module or 'a package'}: install {EXTRA}."


def _missing(name: str, module: str | None) -> click.Command:
    """Stands in for a command that cannot be imported, and says what to install."""

    def refuse(**_: object) -> None:
        raise click.ClickException(_needs(name, module))

    return click.Command(
        name,
        callback=refuse,
        short_help=f"(install {EXTRA})",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        add_help_option=False,
    )


@click.group(cls=Commands)
@click.version_option(package_name="doubly-sparse-softmax")
def cli() -> None:
    """Train a doubly sparse softmax and serve its top-k."""


@cli.command()
@click.option("--models", type=click.Path(path_type=Path), help="Folder of <name>/<version>/.")
@click.option("--default-model", help="Which model POST /topk asks [the first by name].")
@click.option("--host", help="Address to listen on [127.0.0.1].")
@click.option("--port", type=int, help="Port to listen on [8000].")
@click.option("--workers", type=int, help="Processes that answer [1].")
@click.option("--log-level", help="debug, info, warning or error [info].")
@click.option("--log-format", help="text or json [text].")
@click.option("--drain-seconds", type=float, help="Answer this long after SIGTERM [3].")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar="DSS_CONFIG",
    help="TOML file of settings; DSS_* variables override it, and flags override those.",
)
def serve(config: Path | None, **flags: object) -> None:
    """Answer top-k requests over HTTP."""
    from service import settings

    given = {name: value for name, value in flags.items() if value is not None}
    loaded = settings.load(given, config)
    if loaded.workers > 1:
        from service import workers  # a supervisor stays small: it imports no server

        workers.supervise(loaded)
    else:
        from service import server

        server.serve(loaded)


BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))


@cli.command()
@BUNDLE
def verify(bundle: Path) -> None:
    """Check a bundle: every file, every graph, and that it answers."""
    import numpy as np

    from service.bundle import read
    from service.engine import Engine

    opened = read(bundle)
    engine = Engine(opened)
    rows = opened.samples
    if rows is None:
        rows = np.zeros((1, engine.hidden_size), np.float32)
    engine.topk(rows, 1)
    click.echo(
        f"{bundle} is a good bundle: {engine.n_classes} classes in {engine.n_experts} experts."
    )


@cli.command()
@BUNDLE
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def inspect(bundle: Path, as_json: bool) -> None:
    """Describe a bundle: classes, experts, sizes, utilization, copies, speedup."""
    from service import inspection
    from service.bundle import read

    facts = inspection.describe(read(bundle))
    click.echo(json.dumps(facts, indent=2) if as_json else inspection.table(facts))


def main() -> None:
    cli()


if __name__ == "__main__":
    main()
