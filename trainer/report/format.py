"""How numbers look on a page."""

from trainer.report.page import Cell, Column
from trainer.report.runs import RANKS

NOTHING, MINUS, TIMES = "\u2013", "\u2212", "\u00d7"  # en dash, minus, times
AT = [Column(f"top\u00a0{rank}") for rank in RANKS]
SPLITS = {"valid": "validation", "test": "test"}


def share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def published_share(value: float | None) -> str:
    """As printed: three digits."""
    return "" if value is None else f"{value:.3f}"


def signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", MINUS)


def times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}{TIMES}"


def microseconds(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.1f}"


def seconds(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.1f} s"


def count(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def plural(number: int, noun: str, several: str = "") -> str:
    return f"{number:,} {noun if number == 1 else several or noun + 's'}"


def cells(*texts: str, style: str = "") -> list[Cell]:
    return [Cell(text, style=style) for text in texts]
