"""The command `dss`. Serving commands live here; `service/cli/group.py` finds those of others."""

from pathlib import Path

import click

from service.cli.completion import NAME, completion
from service.cli.group import CommandGroup
from service.cli.query import query
from service.terminal.console import draws, json_option, show, show_json

SECTIONS = {  # flags of `dss serve` that are settings of a section
    "keys_file": ("access", "keys_file"),
    "tls_cert": ("tls", "cert"),
    "tls_key": ("tls", "key"),
    "tls_ca": ("tls", "ca"),
}


@click.group(
    name=NAME,
    cls=CommandGroup,
    epilog="Exit status: 0 done; 1 failed, and one sentence says why; 2 wrong usage; 130"
    " interrupted.",
)
@click.version_option(package_name="doubly-sparse-softmax")
def cli() -> None:
    """Train a doubly sparse softmax and serve its top-k."""


cli.add_command(query)
cli.add_command(completion)


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
    from service import settings
    from service.http.auth import access, keys, tls

    loaded = settings.load(_nested(flags), config)
    # What cannot be used is refused here, in one sentence, rather than by each worker.
    keys.KeyRing(access.configured(loaded.access))
    if loaded.tls.cert is not None:
        tls.make_context(loaded.tls)
    if loaded.workers > 1:
        from service.server import supervisor  # a supervisor stays small: it imports no server

        supervisor.supervise(loaded)
    else:
        from service.server import server

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
    """Make API keys for a server's key file."""


@keys_group.command(name="new")
@click.option("--name", required=True, help="Who will use it; shown in logs.")
@click.option(
    "--scopes",
    type=click.Choice(["query", "admin"]),
    multiple=True,
    default=["query"],
    show_default=True,
)
@json_option
def new_key(name: str, scopes: tuple[str, ...], as_json: bool) -> None:
    """Make a key. Its entry for the key file goes to stdout, the key itself to stderr.

    With --json the key is printed with the rest.
    """
    from service.http.auth import keys

    token = keys.new()
    if as_json:
        key = keys.make(name, token, scopes)
        show_json({"key": token, **key.model_dump(), "scopes": sorted(key.scopes)})
        return
    click.echo(keys.entry(name, token, scopes))
    click.echo(f"The key, which is shown only now:\n{token}", err=True)


BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))


@cli.command()
@BUNDLE
@json_option
def verify(bundle: Path, as_json: bool) -> None:
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
    classes, experts = engine.n_classes, engine.n_experts
    if as_json:
        show_json({"bundle": str(bundle), "good": True, "classes": classes, "experts": experts})
        return
    good = click.style("good", fg="green", bold=True)
    click.echo(f"{bundle} is a {good} bundle: {classes} classes in {experts} experts.")


@cli.command()
@BUNDLE
@json_option
def inspect(bundle: Path, as_json: bool) -> None:
    """Describe a bundle: classes, experts, traffic, speedup, size."""
    from service.bundle import read
    from service.cli import inspect as inspection

    facts = inspection.describe(read(bundle))
    if as_json:
        show_json(facts)
    elif draws():
        show(inspection.drawing(facts))
    else:
        click.echo(inspection.table(facts))


def main() -> None:
    cli(prog_name=NAME)


if __name__ == "__main__":
    main()
