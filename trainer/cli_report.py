"""`dss report`: finished runs as one page. PyTorch is imported when it runs, not for `--help`."""

import shlex
from pathlib import Path

import click

FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=FOLDER)
@click.option("--out", type=FOLDER, help="Folder for the page.  [default: runs/report]")
@click.option("--numbers", type=FOLDER, help="Also write headline and tables as JSON there.")
@click.option("--markdown", is_flag=True, help="Print the headline tables as Markdown.")
def report(runs: tuple[Path, ...], out: Path | None, numbers: Path | None, markdown: bool) -> None:
    """Show finished RUNs: accuracy against cost, the paper's tables beside ours, the experts.

    A RUN is the folder of a language-model task or of one trained layer. The page, report.html,
    needs nothing else; its pictures lie beside it, and report.json has every number shown.
    --numbers and --markdown alone write no page.
    """
    if out is None and numbers is None and not markdown:
        out = Path("runs/report")
    from trainer import report as reports
    from trainer.files import write_json

    summaries = reports.summaries(reports.gather(runs)) if numbers or markdown else []
    if out is not None:
        command = shlex.join(["dss", "report", *map(str, runs), "--out", str(out)])
        written = reports.write(runs, out, command)
        click.echo(f"{out / reports.PAGE}: {len(written.pictures)} pictures", err=True)
    if numbers is not None:
        command = shlex.join(["dss", "report", *map(str, runs), "--numbers", str(numbers)])
        write_json(numbers, {"command": command, "runs": summaries})
    if markdown:
        click.echo(reports.markdown(summaries))
