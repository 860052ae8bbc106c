"""Class labels: labels.txt, one label a line."""

from collections.abc import Sequence
from io import BytesIO, TextIOWrapper

import numpy as np

from service.bundle.format import LABELS
from service.errors import LabelsWrong

LONGEST_LABEL = 4096  # bytes of UTF-8
LABELS_AT_ONCE = 1024  # labels whose bytes are counted together


def encode(labels: Sequence[str], n_classes: int) -> bytes:
    if len(labels) != n_classes:
        raise LabelsWrong(f"{len(labels)} labels were given for {n_classes} classes.")
    if any("\n" in label for label in labels):
        raise LabelsWrong("A label contains a line break.")
    try:
        content = ("\n".join(labels) + "\n").encode()
    except UnicodeEncodeError as error:
        raise LabelsWrong("A label holds half a character (a lone surrogate).") from error
    _check_lengths(content)
    return content


def decode(content: bytes, n_classes: int) -> tuple[str, ...]:
    """Labels may hold any character but a line break: tokens of language models do."""
    lines = content.removesuffix(b"\n").count(b"\n") + 1
    if lines != n_classes:  # before a file of line breaks becomes that many strings
        raise LabelsWrong(f"{LABELS} has {lines} lines for {n_classes} classes.")
    _check_lengths(content)
    # Line by line: as one text all of it would be as wide as its widest character.
    text = TextIOWrapper(BytesIO(content or b"\n"), encoding="utf-8", newline="\n")
    try:
        return tuple(line.removesuffix("\n") for line in text)
    except UnicodeDecodeError as error:
        raise LabelsWrong(f"{LABELS} is not UTF-8 text.") from error


def _check_lengths(content: bytes) -> None:
    ends = np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n"))
    lengths = np.diff(ends, prepend=-1, append=len(content)) - 1
    line = int(np.argmax(lengths))
    if lengths[line] > LONGEST_LABEL:
        raise LabelsWrong(
            f"The label in line {line + 1} of {LABELS} has {lengths[line]} bytes; "
            f"{LONGEST_LABEL} are possible."
        )


def json_bytes_most(labels: Sequence[str]) -> int:
    """The bytes of the longest label as a JSON string in UTF-8, with its quotation marks."""
    return max(
        (
            _json_bytes_most(labels[first : first + LABELS_AT_ONCE])
            for first in range(0, len(labels), LABELS_AT_ONCE)
        ),
        default=0,
    )


def _json_bytes_most(labels: Sequence[str]) -> int:
    # A line break ends each label and is counted as the two quotation marks.
    written = JSON_BYTES[np.frombuffer(("\n".join(labels) + "\n").encode(), np.uint8)]
    ends = np.flatnonzero(written == 0)
    written[ends] = 2
    starts = np.concatenate([[0], ends[:-1] + 1])
    return int(np.add.reduceat(written, starts, dtype=np.int64).max())


def _json_bytes() -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """How many bytes JSON writes for a byte of a string; 0 for the line break."""
    written = np.ones(256, np.uint8)
    written[:32] = 6  # \u001b
    written[[ord(character) for character in '\b\t\f\r"\\']] = 2
    written[ord("\n")] = 0
    return written


JSON_BYTES = _json_bytes()
