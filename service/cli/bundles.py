"""`dss verify` and `dss inspect`: check and describe a bundle."""

from pathlib import Path

import click

from service.terminal.console import draws, json_option, show, show_json

BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))


@click.command()
@BUNDLE
@json_option
def verify(bundle: Path, as_json: bool) -> None:
    """Check a bundle: every file, every graph, and that it answers."""
    from service.bundle import read
    from service.engine import Engine
    from service.engine.verification import verify_answers

    opened = read(bundle, head=True)
    engine = Engine(opened)
    verify_answers(opened, engine)
    classes, experts = engine.n_classes, engine.n_experts
    if as_json:
        show_json({"bundle": str(bundle), "good": True, "classes": classes, "experts": experts})
        return
    good = click.style("good", fg="green", bold=True)
    click.echo(f"{bundle} is a {good} bundle: {classes} classes in {experts} experts.")


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
