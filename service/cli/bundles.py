"""`dss verify`, `dss sign` and `dss inspect`: check, sign and describe a bundle."""

from pathlib import Path

import click

from service.terminal.console import draws, json_option, show, show_json

BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))
KEY_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@BUNDLE
@click.option("--key", type=KEY_FILE, help="A public key, PEM: it must have signed every file.")
@json_option
def verify(bundle: Path, key: Path | None, as_json: bool) -> None:
    """Check a bundle: every file, every graph, and that it answers."""
    from service.bundle import read, signing
    from service.engine import Engine
    from service.engine.verification import verify_answers

    if key is not None:
        signing.check(bundle, key)

    opened = read(bundle, head=True)
    engine = Engine(opened)
    verify_answers(opened, engine)
    classes, experts = engine.n_classes, engine.n_experts
    if as_json:
        facts = {"bundle": str(bundle), "good": True, "classes": classes, "experts": experts}
        show_json(facts | ({} if key is None else {"signed": True}))
        return
    good = click.style("good", fg="green", bold=True)
    signed = "" if key is None else f", signed by {key}"
    click.echo(f"{bundle} is a {good} bundle{signed}: {classes} classes in {experts} experts.")


@click.command()
@BUNDLE
@click.option("--key", type=KEY_FILE, required=True, help="A private key, PEM, on P-256 or larger.")
@click.option("--password-file", type=KEY_FILE, help="Holds the key's password, if it has one.")
@json_option
def sign(bundle: Path, key: Path, password_file: Path | None, as_json: bool) -> None:
    """Sign a bundle with a private key; verify --key checks it."""
    from service.bundle import read, signing

    read(bundle, head=True)
    password = None if password_file is None else _password(password_file)
    signature = signing.sign(bundle, key, password)
    if as_json:
        show_json({"bundle": str(bundle), "signature": str(signature)})
        return
    click.echo(f"{bundle} is signed: {signature}")


def _password(file: Path) -> bytes:
    from service.bundle.signing import KeyUnusable

    try:
        return file.read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise KeyUnusable(f"The password file {file} cannot be read: {error.strerror}.") from error


@click.command()
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
