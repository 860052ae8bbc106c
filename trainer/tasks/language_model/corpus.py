"""A text corpus as class numbers: words between spaces, `<eos>` after each line."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from service.errors import DSSError

EOS = "<eos>"
SPLITS = ("train", "valid", "test")
LAYOUTS = {"ptb": "ptb.{}.txt", "wikitext": "wiki.{}.tokens"}


class CorpusMissing(DSSError):
    pass


class CorpusAmbiguous(DSSError):
    pass


class CorpusMalformed(DSSError):
    pass


class WordUnknown(DSSError):
    pass


@dataclass(frozen=True)
class Corpus:
    name: str
    vocabulary: tuple[str, ...]
    splits: Mapping[str, NDArray[np.int32]]

    @property
    def start(self) -> int:
        """What stands before the first word of a split."""
        return self.vocabulary.index(EOS)

    def digest(self) -> str:
        content = hashlib.sha256("\n".join(self.vocabulary).encode())
        for split in SPLITS:
            content.update(self.splits[split].tobytes())
        return content.hexdigest()


def read(folder: Path, vocabulary: Iterable[str] | None = None, name: str | None = None) -> Corpus:
    """The corpus in a folder or one level down; of several, the one of that name.

    Without a given vocabulary, the training words in the order in which they first appear.
    """
    name, files = find(folder, name)
    given = words(files["train"]) if vocabulary is None else vocabulary
    numbers = {word: number for number, word in enumerate(dict.fromkeys(given))}
    return Corpus(name, tuple(numbers), {s: encode(files[s], numbers) for s in SPLITS})


def find(folder: Path, wanted: str | None = None) -> tuple[str, dict[str, Path]]:
    if not folder.is_dir():
        raise CorpusMissing(f"{folder} is not a folder.")
    places = [folder, *sorted(place for place in folder.iterdir() if place.is_dir())]
    sought = LAYOUTS if wanted is None else {wanted: LAYOUTS[wanted]}
    found = []
    for place in places:
        for name, layout in sought.items():
            files = {split: place / layout.format(split) for split in SPLITS}
            if all(file.is_file() for file in files.values()):
                found.append((name, files))
    if not found:
        layouts = " nor ".join(layout.format("{train,valid,test}") for layout in sought.values())
        neither = "neither" if len(sought) > 1 else "no"
        raise CorpusMissing(f"{folder} holds {neither} {layouts}, nor does a folder in it.")
    if len(found) > 1:
        names = ", ".join(str(files["train"].parent) for _, files in found)
        raise CorpusAmbiguous(f"{folder} holds more than one corpus ({names}); name one of them.")
    return found[0]


def words(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                yield from line.split()
                yield EOS
    except OSError as error:
        raise CorpusMissing(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise CorpusMalformed(f"{file} is not UTF-8 text.") from error


def encode(file: Path, numbers: Mapping[str, int]) -> NDArray[np.int32]:
    try:
        tokens = np.fromiter((numbers[word] for word in words(file)), np.int32)
    except KeyError as error:
        raise WordUnknown(f"{file} has a word outside the vocabulary: {error}.") from None
    if not len(tokens):
        raise CorpusMalformed(f"{file} is empty.")
    return tokens
