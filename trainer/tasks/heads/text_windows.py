"""Windows of text for a language model: blocks that are spread evenly over files.

Files may be of any size: only the bytes of a window are read. S = 1 sequence, T tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from service.errors import DSSError

BYTES_PER_TOKEN = 6  # read for each token that is wanted; English text has 4 to 5
HELD_OUT = {"train": (0.0, 0.8), "valid": (0.8, 0.9), "test": (0.9, 1.0)}  # of one text's bytes


class TextMissing(DSSError):
    pass


@dataclass(frozen=True)
class Text:
    """Files one after another, or a part of their bytes: from share `begin` to share `end`."""

    files: tuple[Path, ...]
    begin: float = 0.0
    end: float = 1.0


def splits_of(
    train: tuple[Path, ...], valid: tuple[Path, ...], test: tuple[Path, ...]
) -> dict[str, Text]:
    """Each split's own files; without any, the end of the training text is put aside."""
    if not valid and not test:
        return {split: Text(train, *shares) for split, shares in HELD_OUT.items()}
    return {"train": Text(train), "valid": Text(valid), "test": Text(test)}


@dataclass(frozen=True)
class Windows:
    """Batches of one sequence for `trainer.capture`; the same ones each time."""

    text: Text
    tokenizer: Any
    context: int  # tokens, at most
    rows: int  # that are wanted: a window gives one less than it has tokens

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for block in self.blocks():
            tokens = self.tokenizer(block, truncation=True, max_length=self.context)["input_ids"]
            if len(tokens) > 1:
                yield {"input_ids": torch.tensor([tokens]), "use_cache": False}  # [S,T]

    def blocks(self) -> Iterator[str]:
        """Each begins with a whole word."""
        size = sum(sizes(self.text.files))
        first, last = round(size * self.text.begin), round(size * self.text.end)
        length = self.context * BYTES_PER_TOKEN
        windows = min(math.ceil(self.rows / (self.context - 1)), max(1, (last - first) // length))
        for number in range(windows):
            begin = first + (last - first) * number // windows
            yield self.read(begin, min(length, last - begin))

    def read(self, begin: int, length: int) -> str:
        for file, size in zip(self.text.files, sizes(self.text.files), strict=True):
            if begin < size:
                with file.open("rb") as opened:
                    opened.seek(begin)
                    text = opened.read(length).decode(errors="ignore")
                return text if begin == 0 else _from_a_word(text)
            begin -= size
        return ""


def sizes(files: tuple[Path, ...]) -> list[int]:
    try:
        found = [file.stat().st_size for file in files]
    except OSError as error:
        raise TextMissing(f"{error.filename} cannot be read: {error.strerror}.") from error
    if not sum(found):
        raise TextMissing(f"There is no text in {', '.join(map(str, files))}.")
    return found


def _from_a_word(text: str) -> str:
    _, *rest = text.split(maxsplit=1)
    return rest[0] if rest else text
