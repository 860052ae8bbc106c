"""Tables, and the part of a document between two markers that a benchmark renders."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from service.errors import DSSError
from trainer.data.files import write_whole


class MarkersMissing(DSSError):
    """The document has no place for what is rendered."""


def write_part(document: Path, name: str, body: str) -> None:
    """Replace what stands between a document's markers of that name."""
    text = with_part(document.read_text(encoding="utf-8"), name, body, str(document))
    write_whole(document, text.encode())


def with_part(text: str, name: str, body: str, where: str = "The document") -> str:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise MarkersMissing(f"{where} has no {begin} followed by {end}.")
    return f"{before}{begin}\n{body.strip()}\n{end}{after}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
