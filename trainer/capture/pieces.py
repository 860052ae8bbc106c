"""Writes a capture of vectors that no PyTorch module is hooked for: a source makes them in pieces.

M rows, D hidden, N classes.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.terminal import progress as bars
from trainer.capture.folder import Captured
from trainer.capture.stored import STORED, stored
from trainer.capture.writer import CaptureFolder

Made = tuple[NDArray[np.float32], NDArray[Any]]  # hidden vectors [M,D] and labels [M]


class Piece(NamedTuple):
    """Rows of one split; they are made only if they are not in the files yet."""

    split: str
    rows: int
    make: Callable[[], Made]


@dataclass(frozen=True)
class Source:
    """A trained head, and its inputs: the same pieces in the same order each time it is read."""

    head: NDArray[np.float32]  # [N,D]
    pieces: Iterable[Piece]
    rows: int  # of all pieces, for the progress bar
    about: Mapping[str, Any]  # what the pieces depend on: if it changes, a capture cannot go on
    bias: NDArray[np.float32] | None = None  # [N]
    facts: Mapping[str, Any] = field(default_factory=dict)  # besides, for capture.json


def write_pieces(source: Source, out: Path, dtype: str) -> Captured:
    """Write what is missing; a capture that was interrupted goes on where it was."""
    n_classes, hidden_size = source.head.shape
    settings = {"dtype": dtype, **source.about}
    folder = CaptureFolder(out, hidden_size, STORED[dtype], settings)
    with closing(folder):
        try:
            _write_missing(source, folder, STORED[dtype])
        finally:
            folder.save()
        rows = folder.progress.rows
        facts = {
            "complete": True,
            "rows": rows["train"],
            "valid_rows": rows["valid"],
            "test_rows": rows["test"],
            "n_classes": n_classes,
            "hidden_size": hidden_size,
            "bias": source.bias is not None,
            **settings,
            **source.facts,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        return folder.finish(source.head, source.bias, facts)


def _write_missing(source: Source, folder: CaptureFolder, dtype: np.dtype[Any]) -> None:
    done = folder.progress.batches
    with bars.bar("hidden vectors, rows", source.rows) as bar:
        for number, piece in enumerate(source.pieces):
            if number >= done:
                hidden, labels = piece.make()
                folder.append(piece.split, stored(hidden, dtype, number), labels)
            bar.advance(piece.rows)
