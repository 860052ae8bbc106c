"""Reads query rows from a file or stdin: a .npy array, JSON, or numbers in text.

The first bytes tell the format, so file names do not matter.

B rows, D hidden.
"""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import DSSError
from service.npy import MAGIC

STDIN = "-"
BETWEEN = re.compile(r"[,;\s]+")


class RowsMissing(DSSError):
    pass


class RowsUnreadable(DSSError):
    pass


def read_rows(source: str) -> NDArray[np.float32]:
    """[B,D]; a single row may come without its outer brackets or dimension."""
    name, content = _content(source)
    if content.startswith(MAGIC):
        array = _npy(name, content)
    elif content.lstrip()[:1] in (b"[", b"{"):
        array = _json(name, content)
    else:
        array = _text(name, content)
    if not array.size:
        raise RowsUnreadable(f"{name} holds no rows.")
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2:
        raise RowsUnreadable(f"{name} has shape {list(array.shape)}; [rows, width] is expected.")
    with np.errstate(over="ignore"):  # what is too large is refused as an infinity
        return np.ascontiguousarray(array, np.float32)


def _content(source: str) -> tuple[str, bytes]:
    if source == STDIN:
        return "stdin", sys.stdin.buffer.read()
    path = Path(source)
    if not path.exists():
        raise RowsMissing(f"{path} does not exist.")
    try:
        return source, path.read_bytes()
    except OSError as error:
        raise RowsUnreadable(f"{path} cannot be read: {error.strerror}.") from error


def _npy(name: str, content: bytes) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # what NumPy raises for a broken header has no common base
        raise RowsUnreadable(f"{name} is not a whole .npy file of plain numbers.") from error
    if array.dtype.kind not in "fiu":
        raise RowsUnreadable(f"{name} holds {array.dtype.name}; numbers are expected.")
    return array


def _json(name: str, content: bytes) -> NDArray[np.float64]:
    """[[...], ...], or a request's body: {"inputs": [[...], ...]}."""
    try:
        found = json.loads(content)
        return np.array(found["inputs"] if isinstance(found, dict) else found, np.float64)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RowsUnreadable(
            f"{name} is not JSON of the form [[0.5, ...], ...], all rows equally long."
        ) from error


def _text(name: str, content: bytes) -> NDArray[np.float64]:
    """One row a line, with commas or blanks between its numbers."""
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise RowsUnreadable(f"{name} is neither .npy nor JSON nor numbers in text.") from error
    rows: list[list[float]] = []
    for number, line in enumerate(lines, start=1):
        words = BETWEEN.split(line.strip(" ,;\t"))
        if words == [""]:
            continue
        rows.append([_number(word, f"{name}, line {number}") for word in words])
        if len(rows[-1]) != len(rows[0]):
            raise RowsUnreadable(
                f"{name}, line {number} has {len(rows[-1])} numbers, but the first row has"
                f" {len(rows[0])}."
            )
    return np.array(rows, np.float64)


def _number(word: str, place: str) -> float:
    try:
        return float(word)
    except ValueError as error:
        raise RowsUnreadable(f"{place} has {word[:40]!r}, which is not a number.") from error
