"""One self-contained HTML page out of headings, sentences, tables, pictures and word lists."""

import base64
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATE = "report.html.jinja"


@dataclass(frozen=True)
class Text:
    block: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Code:
    block: ClassVar[str] = "code"
    text: str


@dataclass(frozen=True)
class Cell:
    text: str
    note: str = ""  # small, below
    style: str = ""  # CSS classes


@dataclass(frozen=True)
class Column:
    name: str
    style: str = "number"


@dataclass(frozen=True)
class Group:
    """A heading over some columns."""

    name: str
    span: int
    style: str = ""


@dataclass(frozen=True)
class Table:
    block: ClassVar[str] = "table"
    caption: str
    columns: list[Column]
    rows: list[list[Cell]]
    groups: list[Group] = field(default_factory=list)
    folded: bool = False  # behind its caption


@dataclass(frozen=True)
class Picture:
    block: ClassVar[str] = "picture"
    file: str
    png: bytes
    alt: str
    caption: str
    narrow: bool = False

    @property
    def source(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.png).decode()

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, from the PNG's header, so that the page does not jump."""
        width, height = struct.unpack(">II", self.png[16:24])
        return width, height


@dataclass(frozen=True)
class WordLists:
    block: ClassVar[str] = "words"
    lists: list[tuple[str, list[str]]]  # heading, words


Block = Text | Code | Table | Picture | WordLists


@dataclass(frozen=True)
class Section:
    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Chapter:
    """All about one run."""

    title: str
    subtitle: str
    anchor: str
    sections: list[Section]

    @property
    def pictures(self) -> list[Picture]:
        blocks = (block for section in self.sections for block in section.blocks)
        return [block for block in blocks if isinstance(block, Picture)]


def render(title: str, chapters: list[Chapter]) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # words of a corpus stand on the page
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(title=title, chapters=chapters)
