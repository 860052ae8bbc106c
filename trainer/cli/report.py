"""`dss report`: finished runs as one page. PyTorch is imported when it runs, not for `--help`."""

import shlex
from pathlib import Path
from typing import Any

import click

from service.terminal.console import json_option, show_json
from service.terminal.messages import say
from service.terminal.text import printable_lines

FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=FOLDER)
@click.option("--out", type=FOLDER, help="Folder for the page.  [default: runs/report]")
@click.option("--numbers", type=FOLDER, help="Also write headline and tables as JSON there.")
@click.option("--markdown", is_flag=True, help="Print the headline tables as Markdown.")
@json_option
def report(
    runs: tuple[Path, ...], out: Path | None, numbers: Path | None, markdown: bool, as_json: bool
) -> None:
    """Draw finished RUNs on one page: accuracy, cost, experts.

    Accuracy against cost, the paper's tables beside ours, and what the experts hold. A RUN is the
    folder of a language-model task or of one trained layer. The page, report.html, needs nothing
    else; its pictures lie beside it, and report.json has every number shown. --numbers and
    --markdown alone write no page.
    """
    if markdown and as_json:
        raise click.UsageError("Give either --markdown or --json.")
    if out is None and numbers is None and not markdown:
        out = Path("runs/report")
    from trainer.data.files import write_json
    from trainer.report import report as reports

    summaries = reports.summaries(reports.gather(runs)) if numbers or markdown else []
    told: dict[str, Any] = {"page": None, "numbers": None, "runs": summaries}
    if out is not None:
        command = shlex.join(["dss", "report", *map(str, runs), "--out", str(out)])
        written = reports.write(runs, out, command)
        say(f"{out / reports.PAGE}: {len(written.pictures)} pictures")
        told |= {"page": str(out / reports.PAGE), "runs": written.numbers["runs"]}
    if numbers is not None:
        command = shlex.join(["dss", "report", *map(str, runs), "--numbers", str(numbers)])
        write_json(numbers, {"command": command, "runs": summaries})
        told["numbers"] = str(numbers)
    if markdown:
        click.echo(printable_lines(reports.markdown(summaries)))
    if as_json:
        show_json(told)
