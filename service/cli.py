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
SECTIONS = {  # flags of `dss serve` that are settings of a section
    "keys_file": ("access", "keys_file"),
    "tls_cert": ("tls", "cert"),
    "tls_key": ("tls", "key"),
    "tls_ca": ("tls", "ca"),
}
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
@click.option("--workers", help="Processes that answer, or auto: one for each CPU [1].")
@click.option("--log-level", help="debug, info, warning or error [info].")
@click.option("--log-format", help="text or json [text].")
@click.option("--drain-seconds", type=float, help="Answer this long after SIGTERM [3].")
@click.option("--keys-file", type=click.Path(path_type=Path), help="TOML file of API keys.")
@click.option("--tls-cert", type=click.Path(path_type=Path), help="Certificate, PEM: speak TLS.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="Its private key, PEM.")
@click.option(
    "--tls-ca",
    type=click.Path(path_type=Path),
    help="CA certificates, PEM: clients must show a certificate signed by one of them.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar="DSS_CONFIG",
    help="TOML file of settings; DSS_* variables override it, and flags override those.",
)
def serve(config: Path | None, **flags: object) -> None:
    """Answer top-k requests over HTTP."""
    from service import access, keys, settings, tls

    loaded = settings.load(_nested(flags), config)
    # What cannot be used is refused here, in one sentence, rather than by each worker.
    keys.KeyRing(access.configured(loaded.access))
    if loaded.tls.cert is not None:
        tls.make_context(loaded.tls)
    if loaded.workers > 1:
        from service import workers  # a supervisor stays small: it imports no server

        workers.supervise(loaded)
    else:
        from service import server

        server.serve(loaded)


def _nested(flags: dict[str, object]) -> dict[str, object]:
    """The flags that were given, those of a section under its name."""
    given: dict[str, object] = {}
    for name, value in flags.items():
        if value is None:
            continue
        section, part = SECTIONS.get(name, (None, name))
        inner = given if section is None else given.setdefault(section, {})
        assert isinstance(inner, dict)  # noqa: S101
        inner[part] = value
    return given


@cli.group(name="keys")
def keys_group() -> None:
    """API keys for a server's key file."""


@keys_group.command(name="new")
@click.option("--name", required=True, help="Who will use it; shown in logs.")
@click.option(
    "--scopes",
    type=click.Choice(["query", "admin"]),
    multiple=True,
    default=["query"],
    show_default=True,
)
def new_key(name: str, scopes: tuple[str, ...]) -> None:
    """Make a key. Its entry for the key file goes to stdout, the key itself to stderr."""
    from service import keys

    token = keys.new()
    click.echo(keys.entry(name, token, scopes))
    click.echo(f"The key, which is shown only now:\n{token}", err=True)


BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))


@cli.command()
@BUNDLE
def verify(bundle: Path) -> None:
    """Check a bundle: every file, every graph, and that it answers."""
    import numpy as np

    from service.bundle import read
    from service.engine import Engine

    opened = read(bundle, head=True)
    engine = Engine(opened)
    rows = opened.samples
    if rows is None:
        rows = np.zeros((1, engine.hidden_size), np.float32)
    engine.topk(rows, 1)
    if opened.head is not None:
        Engine(opened.head).topk(rows, 1)
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
