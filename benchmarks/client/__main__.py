"""The Python client beside tritonclient, or with --transports beside HTTP libraries under its core.

python -m benchmarks.client --document docs/client.md
python -m benchmarks.client --transports --document docs/client.md
"""

import shlex
import sys
from pathlib import Path

import click

from benchmarks.client.report import (
    PEER_PACKAGES,
    RESULTS,
    TRANSPORT_PACKAGES,
    TRANSPORT_RESULTS,
    rendered,
    rendered_transports,
)
from benchmarks.client.turns import K
from benchmarks.document import write_part
from service.system.machine import machine
from trainer.data.files import write_json


@click.command()
@click.option("--transports", is_flag=True, help="HTTP libraries under the client's own core.")
@click.option("--rounds", default=40, help="Each contestant's turns. [40]")
@click.option("--calls", default=160, help="Requests of a turn. [160]")
@click.option("--rows", help="Of a request. [1,64; with --transports 1,32]")
@click.option("--out", type=click.Path(path_type=Path), help="Where the results go.")
@click.option("--document", type=click.Path(path_type=Path), help="Where the table goes.")
def main(
    transports: bool,
    rounds: int,
    calls: int,
    rows: str | None,
    out: Path | None,
    document: Path | None,
) -> None:
    # Each comparison imports its own libraries, so that neither needs the other's.
    if transports:
        from benchmarks.client.under_core import compare
    else:
        from benchmarks.client.peers import compare
    sizes = [int(part) for part in (rows or ("1,32" if transports else "1,64")).split(",")]
    results = {
        "command": shlex.join(["python", "-m", "benchmarks.client", *sys.argv[1:]]),
        "machine": machine(*(TRANSPORT_PACKAGES if transports else PEER_PACKAGES)),
        "rounds": rounds,
        "calls": calls,
        "k": K,
        "points": compare(rounds, calls, sizes),
    }
    write_json(out or (TRANSPORT_RESULTS if transports else RESULTS), results)
    if document is not None and transports:
        write_part(document, "transports", rendered_transports(results))
    elif document is not None:
        write_part(document, "client", rendered(results))


if __name__ == "__main__":
    main()
