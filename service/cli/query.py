"""`dss query`: rows from a file, answers from a server, or from a bundle without one.

B rows, D hidden, k answers.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from service.errors import DSSError
from service.terminal import console, progress
from service.terminal.text import printable

if TYPE_CHECKING:
    import numpy as np
    from click.shell_completion import CompletionItem
    from numpy.typing import NDArray
    from rich.console import RenderableType

URL = "http://localhost:8000"
# Of one request; a server's default limits allow as many.
MOST_ROWS = 1024
MOST_BYTES = 4 * 2**20
RUNG_WIDTH = len("escalated")


class NothingToAsk(DSSError):
    """The target is neither a server nor a bundle, or there are no rows for it."""


class Answer(Protocol):
    """The answer of a server's client, or of a bundle."""

    @property
    def model(self) -> str: ...
    @property
    def version(self) -> int | None: ...
    @property
    def classes(self) -> "NDArray[np.int64]": ...  # [B,k]
    @property
    def log_probs(self) -> "NDArray[np.float32]": ...  # [B,k]
    @property
    def experts(self) -> "NDArray[np.int64]": ...  # [B]
    @property
    def gates(self) -> "NDArray[np.float32]": ...  # [B]
    @property
    def labels(self) -> list[list[str]] | None: ...  # [B,k]
    @property
    def searched(self) -> "NDArray[np.int64] | None": ...  # [B]
    @property
    def rungs(self) -> "NDArray[np.str_] | None": ...  # [B]
    @property
    def promise(self) -> str | None: ...


@dataclass(frozen=True)
class Answers:
    model: str
    version: int | None
    classes: "NDArray[np.int64]"
    log_probs: "NDArray[np.float32]"
    experts: "NDArray[np.int64]"
    gates: "NDArray[np.float32]"
    labels: list[list[str]] | None
    searched: "NDArray[np.int64] | None" = None
    rungs: "NDArray[np.str_] | None" = None
    promise: str | None = None


@dataclass(frozen=True)
class Question:
    """What is asked of each row."""

    k: int
    experts: int | None
    exact: bool
    recall: float | None
    rescore: bool


Ask = Callable[["NDArray[np.float32]"], Answer]
Samples = Callable[[], "NDArray[np.float32] | None"]


def parse_rows(context: click.Context, option: click.Parameter, value: str | None) -> slice | None:
    """A:B, A:, :B or one row's number; from 0 on."""
    del context, option
    if value is None:
        return None
    first, colon, last = value.partition(":")
    if not all(text.isdecimal() or (colon and not text) for text in (first, last or first)):
        raise click.BadParameter(f"{value!r} is neither a row's number nor A:B.")
    if not colon:
        return slice(int(first), int(first) + 1)
    return slice(int(first or 0), int(last) if last else None)


def complete_folders(
    context: click.Context, option: click.Parameter, incomplete: str
) -> "list[CompletionItem[str]]":
    del context, option
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="dir")]


@click.command()
@click.argument("target", metavar="[URL|BUNDLE]", default=URL, shell_complete=complete_folders)
@click.option(
    "--input",
    "source",
    type=click.Path(allow_dash=True),
    metavar="FILE",
    help="Rows: .npy, JSON or text; - is stdin.",
)
@click.option("--sample", is_flag=True, help="Ask about the samples that the bundle carries.")
@click.option("--rows", callback=parse_rows, metavar="A:B", help="Only these rows of the input.")
@click.option(
    "-k", "--k", type=click.IntRange(min=1), default=5, show_default=True, help="Answers a row."
)
@click.option(
    "--experts", type=click.IntRange(min=1), help="To search.  [default: 1, or the server's recall]"
)
@click.option("--exact", is_flag=True, help="The best k of the whole output layer, proven.")
@click.option(
    "--recall",
    type=click.FloatRange(min=0, min_open=True, max=1),
    metavar="SHARE",
    help="Find this share of the best k, on average: rows that might miss more are scanned.",
)
@click.option("--rescore", is_flag=True, help="Rank what is found by the output layer's scores.")
@click.option("--model", help="Which model to ask.  [default: the server's]")
@click.option("--version", help="Which version, or a label of one.  [default: the server's]")
@click.option("--api-key", envvar="DSS_API_KEY", show_envvar=True, help="For a server with keys.")
@click.option(
    "--ca",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="CA certificates, PEM, to trust instead of the system's.",
)
@click.option("--insecure", is_flag=True, help="Trust whatever certificate the server shows.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="Seconds to wait for an answer.",
)
@console.json_option
def query(
    target: str,
    source: str | None,
    sample: bool,
    rows: slice | None,
    k: int,
    experts: int | None,
    exact: bool,
    recall: float | None,
    rescore: bool,
    as_json: bool,
    **server: Any,
) -> None:
    """Ask a server, or a bundle without one, for its top-k.

    \b
      dss query --input rows.npy -k 5                   the server at localhost:8000
      dss query https://host --input - < rows.json      another one
      dss query models/demo/1 --sample                  a bundle, and no server at all
      dss query --input rows.npy --recall 0.99          how each row was answered is shown
    """
    if (source is None) == (not sample):
        raise click.UsageError("Give rows: either --input FILE or --sample.")
    if server["ca"] is not None and server["insecure"]:
        raise click.UsageError("Give either --ca or --insecure.")
    if exact + (recall is not None) + rescore > 1:
        raise click.UsageError("Give one of --exact, --recall and --rescore.")
    if experts is not None and (exact or recall is not None):
        raise click.UsageError("--experts goes with neither --exact nor --recall.")
    ask, samples = _target(target, Question(k, experts, exact, recall, rescore), **server)
    hidden, first = _hidden(source, samples, target, rows)
    answer = ask(hidden)
    if as_json:
        _print_json(answer)
    elif console.draws():
        console.show(*_drawings(answer, first))
    else:
        click.echo(table(answer, first))


# --- the target ---------------------------------------------------------------------------------


def _target(target: str, question: Question, **server: Any) -> tuple[Ask, Samples]:
    """Functions that query the target and that read its sample rows."""
    if "://" in target:
        return _server(target, question, **server)
    if not Path(target).is_dir():
        raise NothingToAsk(f"{target!r} is neither a URL such as {URL} nor the folder of a bundle.")
    if server["model"] or server["version"]:
        raise click.UsageError("--model and --version are for a server; a bundle is one version.")
    return _bundle(Path(target), question)


def _server(
    url: str,
    question: Question,
    *,
    model: str | None,
    version: str | None,
    api_key: str | None,
    ca: Path | None,
    insecure: bool,
    timeout: float,
) -> tuple[Ask, Samples]:
    from service.client import Client

    client = Client(
        url,
        model=model,
        version=int(version) if version and version.isdecimal() else version,
        api_key=api_key,
        timeout=timeout,
        verify=not insecure if ca is None else str(ca),
    )
    click.get_current_context().with_resource(client)

    def ask(hidden: "NDArray[np.float32]") -> Answer:
        return client.topk(hidden, **asdict(question), labels=True)

    return ask, client.samples


def _bundle(folder: Path, question: Question) -> tuple[Ask, Samples]:
    import numpy as np

    from service.bundle import read
    from service.engine import Engine
    from service.topk import RUNGS, Mode

    opened = read(folder)
    engine, names = Engine(opened), opened.labels
    place = folder.resolve()
    numbered = place.name.isdecimal()
    mode = Mode(question.exact, question.recall, question.rescore)

    def ask(hidden: "NDArray[np.float32]") -> Answers:
        found = engine.topk(hidden, question.k, question.experts or 1, mode)
        return Answers(
            model=place.parent.name if numbered else place.name,
            version=int(place.name) if numbered else None,
            classes=found.classes,
            log_probs=found.log_probs,
            experts=found.experts,
            gates=found.gates,
            labels=None if names is None else [[names[c] for c in row] for row in found.classes],
            searched=found.searched,
            rungs=None if found.rungs is None else np.array(RUNGS)[found.rungs],
        )

    return partial(_ask_in_parts, ask), lambda: opened.samples


def _hidden(
    source: str | None, samples: Samples, target: str, rows: slice | None
) -> tuple["NDArray[np.float32]", int]:
    """The rows to ask about, and the number of the first."""
    from service.cli.query_input import read_rows

    hidden = samples() if source is None else read_rows(source)
    if hidden is None or not len(hidden):
        raise NothingToAsk(f"{target} gives no samples: bring rows with --input FILE.")
    first, last, _ = (rows or slice(None)).indices(len(hidden))
    if last <= first:
        raise NothingToAsk(f"--rows leaves none of the {len(hidden)} rows.")
    return hidden[first:last], first


def _ask_in_parts(ask: Ask, hidden: "NDArray[np.float32]") -> Answer:
    import numpy as np

    size = max(1, min(MOST_ROWS, MOST_BYTES // hidden[0].nbytes))
    parts = [hidden[begin : begin + size] for begin in range(0, len(hidden), size)]
    if len(parts) == 1:
        return ask(hidden)
    found = [ask(part) for part in progress.each(parts, "asking")]
    names = [part.labels for part in found]
    return Answers(
        model=found[0].model,
        version=found[0].version,
        classes=np.concatenate([part.classes for part in found]),
        log_probs=np.concatenate([part.log_probs for part in found]),
        experts=np.concatenate([part.experts for part in found]),
        gates=np.concatenate([part.gates for part in found]),
        labels=[row for rows in names if rows is not None for row in rows] or None,
        searched=_joined([part.searched for part in found]),
        rungs=_joined([part.rungs for part in found]),
    )


def _joined(parts: "list[NDArray[Any] | None]") -> "NDArray[Any] | None":
    import numpy as np

    found = [part for part in parts if part is not None]
    return np.concatenate(found) if found else None


# --- output: JSON, a plain table, a drawing -----------------------------------------------------


def _print_json(answer: Answer) -> None:
    """As a server answers /topk."""
    import numpy as np
    import orjson

    arrays = {
        "classes": answer.classes,
        "log_probs": answer.log_probs,
        "labels": answer.labels,
        "experts": answer.experts,
        "gates": answer.gates,
        "searched": answer.searched,
        "rungs": None if answer.rungs is None else answer.rungs.tolist(),
        "promise": answer.promise,
    }
    plain = {
        name: np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value
        for name, value in arrays.items()
        if value is not None
    }
    content = {"model": answer.model, "version": answer.version, **plain}
    click.echo(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY).decode())


def table(answer: Answer, first: int) -> str:
    """A line for each answer; how its row was answered only if a mode was asked for."""
    number = max(3, len(str(first + len(answer.classes) - 1)))
    rung = "" if answer.rungs is None else f"  {'answered':<{RUNG_WIDTH}}"
    lines = [f"{'row':>{number}}{rung}  expert    gate  {'class':>9}  log prob  label"]
    if answer.labels is None:
        lines[0] = lines[0].removesuffix("  label")
    for row, (classes, log_probs) in enumerate(
        zip(answer.classes.tolist(), answer.log_probs.tolist(), strict=True)
    ):
        for place, (found, value) in enumerate(zip(classes, log_probs, strict=True)):
            label = "" if answer.labels is None else f"  {printable(answer.labels[row][place])}"
            lines.append(
                f"{first + row:>{number}}{_rung(answer, row)}"
                f"  {answer.experts[row]:>6}  {answer.gates[row]:.4f}"
                f"  {found:>9}  {value:>8.4f}{label}"
            )
    if answer.promise is not None:
        lines.append(_promise(answer.promise))
    return "\n".join(lines)


def _rung(answer: Answer, row: int) -> str:
    return "" if answer.rungs is None else f"  {answer.rungs[row]:<{RUNG_WIDTH}}"


def _promise(promise: str) -> str:
    if promise == "kept":
        return "The promised recall is kept."
    return "The promised recall is withdrawn: the traffic is not what it was calibrated on."


def _drawings(answer: Answer, first: int) -> "list[RenderableType]":
    """A small table for each row, with bars for the probabilities."""
    from math import exp

    from rich import box
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    drawn: list[RenderableType] = []
    for row, (classes, log_probs) in enumerate(
        zip(answer.classes.tolist(), answer.log_probs.tolist(), strict=True)
    ):
        where = f"  expert {answer.experts[row]}, gate {answer.gates[row]:.4f}"
        if answer.rungs is not None:
            where += f", {answer.rungs[row]}"
        title = Text.assemble((f"row {first + row}", "bold"), (where, "dim"))
        answers = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        answers.add_column("class", justify="right", style="cyan", no_wrap=True)
        if answer.labels is not None:
            answers.add_column("label", overflow="fold")
        answers.add_column("log prob", justify="right", no_wrap=True)
        answers.add_column("probability")
        for place, (found, value) in enumerate(zip(classes, log_probs, strict=True)):
            label = [] if answer.labels is None else [printable(answer.labels[row][place])]
            filled = ProgressBar(1.0, exp(min(value, 0.0)), width=20)
            answers.add_row(str(found), *label, f"{value:.4f}", filled)
        drawn += [title, answers]
    if answer.promise is not None:
        drawn.append(Text(_promise(answer.promise), "dim"))
    return drawn
