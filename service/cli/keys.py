"""`dss keys`: creates API keys."""

import click

from service.terminal.console import json_option, show_json


@click.group()
def keys() -> None:
    """Make API keys for a server's key file."""


@keys.command(name="new")
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
    from service.http.auth import keys as api_keys

    token = api_keys.new()
    if as_json:
        key = api_keys.make(name, token, scopes)
        show_json({"key": token, **key.model_dump(), "scopes": sorted(key.scopes)})
        return
    click.echo(api_keys.entry(name, token, scopes))
    click.echo(f"The key, which is shown only now:\n{token}", err=True)
