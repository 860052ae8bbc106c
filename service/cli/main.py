"""The command `dss`. `service/cli/group.py` finds the commands of other packages."""

import click

from service.cli.bundles import inspect, sign, verify
from service.cli.completion import NAME, completion
from service.cli.group import CommandGroup
from service.cli.keys import keys
from service.cli.query import query
from service.cli.serve import serve


@click.group(
    name=NAME,
    cls=CommandGroup,
    epilog="Exit status: 0 done; 1 failed, and one sentence says why; 2 wrong usage; 3 a"
    " required figure was not reached; 130 interrupted.",
)
@click.version_option(package_name="doubly-sparse-softmax")
def cli() -> None:
    """Train a doubly sparse softmax and serve its top-k."""


for command in (serve, query, keys, verify, sign, inspect, completion):
    cli.add_command(command)


def main() -> None:
    cli(prog_name=NAME)
