"""`dss bench`. Everything slow to import is imported when a command runs."""

import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from service.errors import DSSError
from service.terminal import progress
from service.terminal.console import json_option, show_json
from service.terminal.messages import say, teller
from service.terminal.text import printable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from service.bench.target import Server
    from service.engine import BackendName

PLOTS = (".svg", ".png")
Command = Callable[..., Any]


class ListWrong(DSSError):
    """An option is no list of what it should be, with commas between."""


class OptionWrong(DSSError):
    pass


def counts(context: click.Context, option: click.Parameter, value: str) -> tuple[int, ...]:
    """Positive integers with commas between."""
    del context
    texts = value.split(",")
    if not all(text.strip().isdecimal() and int(text) > 0 for text in texts):
        raise ListWrong(
            f"{option.opts[0]} takes positive integers with commas between, not {value!r}."
        )
    return tuple(dict.fromkeys(int(text) for text in texts))


def names(context: click.Context, option: click.Parameter, value: str) -> tuple[str, ...]:
    """Backends with commas between."""
    del context
    from service.engine import BackendName

    known = get_args(BackendName)
    texts = tuple(dict.fromkeys(value.split(",")))
    if not set(texts) <= set(known):
        raise ListWrong(
            f"{option.opts[0]} takes some of {', '.join(known)} with commas between, not {value!r}."
        )
    return texts


COUNT = click.IntRange(min=1)
SECONDS = click.FloatRange(min=0, min_open=True)
LIST: dict[str, Any] = {"metavar": "LIST", "show_default": True}
FILE = click.Path(path_type=Path)


def shared_options(command: Command) -> Command:
    for option in (
        json_option,
        click.option("--plot", type=FILE, help="Write a picture: .svg or .png."),
        click.option("--out", type=FILE, help="Also write the JSON to this file."),
        click.option("--hidden", type=FILE, help="A .npy of hidden vectors to ask."),
    ):
        command = option(command)
    return command


@click.group()
def bench() -> None:
    """Measure how fast a bundle answers, in process or over HTTP."""


@bench.command()
@click.argument("bundle", type=FILE)
@click.option("--batch", default="1,8,32,256", callback=counts, help="Rows.", **LIST)
@click.option("--k", default="10", callback=counts, help="Answers for each row.", **LIST)
@click.option("--experts", default="1", callback=counts, help="To search.", **LIST)
@click.option("--threads", default="1", callback=counts, help="Of the engine.", **LIST)
@click.option("--backend", default="auto", callback=names, help="auto, compiled or onnx.", **LIST)
@click.option("--seconds", type=SECONDS, default=1.0, show_default=True, help="For each point.")
@shared_options
def engine(
    bundle: Path,
    batch: tuple[int, ...],
    k: tuple[int, ...],
    experts: tuple[int, ...],
    threads: tuple[int, ...],
    backend: "tuple[BackendName, ...]",
    seconds: float,
    hidden: Path | None,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Time the engine in process.

    Options that take a list sweep it: --batch 1,8,32. CPU is seconds of it per second; "in
    gate", "in experts" and "in rest" say where the time of a call goes; MB is what the bundle adds
    to a process.
    """
    _check_outputs(out, plot)
    from service.bench import engine as engines
    from service.bench import report

    points: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    sweep = engines.Sweep(bundle, hidden, batch, k, experts, threads, backend, seconds)
    tell = teller(as_json)
    n_engines = len(backend) * len(threads)
    needed = n_engines * len(batch) * len(k) * len(experts) * seconds * (1 + engines.WARM_UP_SHARE)
    with progress.bar(f"measuring for {needed:.0f} s", n_engines, steady=True) as bar:
        for measured in engines.sweep(sweep):
            if not points:
                size = measured.bundle_bytes
                facts = {"bundle": str(bundle), "bundle_bytes": size, "rows": measured.rows}
                tell(f"{bundle}, {size / 1e6:,.1f} MB; rows: {measured.rows}\n")
                tell(click.style(report.head(report.ENGINE), bold=True))
            for point in measured.points:
                tell(report.line(report.ENGINE, point))
            points += measured.points
            bar.advance()
    _write(out, as_json, facts, points)
    if plot:
        from service.bench import plot as picture

        picture.engine(points, plot)


@bench.command()
@click.argument("target", metavar="URL|BUNDLE|MODELS")
@click.option("--model", help="Which model to ask [the server's default].")
@click.option("--batch", default="1,32", callback=counts, help="Rows.", **LIST)
@click.option("--concurrency", default="1,4,16", callback=counts, help="Clients.", **LIST)
@click.option("--k", type=COUNT, default=10, show_default=True, help="Answers for each row.")
@click.option("--experts", type=COUNT, default=1, show_default=True, help="To search.")
@click.option(
    "--format",
    "body_format",
    type=click.Choice(["npy", "json"]),
    default="npy",
    show_default=True,
    help="Of requests and answers.",
)
@click.option(
    "--seconds",
    type=SECONDS,
    default=3.0,
    show_default=True,
    help="For each point, in three windows.",
)
@click.option(
    "--attempts",
    type=COUNT,
    default=3,
    show_default=True,
    help="How often a point is measured until its windows agree.",
)
@click.option("--workers", type=COUNT, help="Of the server that is started for a folder.")
@click.option(
    "--generators", type=COUNT, default=1, show_default=True, help="Processes that make the load."
)
@shared_options
def http(
    target: str,
    model: str | None,
    batch: tuple[int, ...],
    concurrency: tuple[int, ...],
    k: int,
    experts: int,
    body_format: str,
    seconds: float,
    attempts: int,
    workers: int | None,
    generators: int,
    hidden: Path | None,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Load a server, and say what it does to latency and throughput.

    A URL is a server that runs; for a bundle or a folder of models one is started on a free port
    and stopped afterwards. Every connection sends its next request when its answer has come.
    Joined rows, queue and compute are the server's own means; CPU is seconds of it per second.
    """
    _check_outputs(out, plot)
    from service.bench import http as requests
    from service.bench import report

    sweep = requests.Sweep(
        hidden, batch, concurrency, k, experts, body_format, seconds, attempts, generators
    )
    tell = teller(as_json)
    with _server(target, workers) as server:
        asked = server.model(model)
        samples = None if _is_url(target) else _samples(Path(target), asked.name, asked.version)
        measured = requests.sweep(sweep, server, asked, samples)
        tell(f"{server.url}, model {printable(asked.name)}; {body_format} rows: {measured.rows}\n")
        tell(click.style(report.head(report.HTTP), bold=True))
        points = []
        with progress.bar("measuring", len(batch) * len(concurrency), steady=True) as bar:
            for point in measured.points:
                points.append(point)
                tell(report.line(report.HTTP, point))
                for remark in report.remarks(point):
                    say(f"Warning: {printable(remark)}")
                bar.advance()
    facts: dict[str, Any] = {
        "target": target,
        "model": asked.name,
        "rows": measured.rows,
        "format": body_format,
        "k": k,
        "experts": experts,
        "workers": workers,
    }
    _write(out, as_json, facts, points)
    if plot:
        from service.bench import plot as picture

        picture.http(points, plot)


def _is_url(target: str) -> bool:
    return "://" in target


def _server(target: str, workers: int | None) -> "AbstractContextManager[Server]":
    from service.bench import server
    from service.bench import target as targets

    if not _is_url(target):
        return server.started(Path(target), workers)
    if workers:
        raise OptionWrong("--workers is for a server that is started; this one runs already.")
    return nullcontext(targets.at(target))


def _samples(folder: Path, model: str, version: int) -> "NDArray[np.float32] | None":
    """Those of the bundle that is served."""
    from service.bench import rows
    from service.bundle.format import MANIFEST

    if not (folder / MANIFEST).is_file():
        folder = folder / model / str(version)
    return rows.samples(folder)


def _check_outputs(out: Path | None, plot: Path | None) -> None:
    """Before anything is measured for nothing."""
    for file in (out, plot):
        if file and not file.parent.is_dir():
            raise OptionWrong(f"There is no folder {file.parent} to write {file.name} to.")
    if plot:
        if plot.suffix not in PLOTS:
            raise OptionWrong(f"--plot writes {' or '.join(PLOTS)}, not {plot.name!r}.")
        import matplotlib  # noqa: F401


def _write(
    out: Path | None, as_json: bool, facts: dict[str, Any], points: list[dict[str, Any]]
) -> None:
    from service.bench import report

    content = report.content(_command(), facts, points)
    if out:
        report.write(out, content)
    if as_json:
        show_json(content)


def _command() -> str:
    return shlex.join(["dss", *sys.argv[1:]])
