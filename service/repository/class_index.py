"""Answers which expert holds which class of a loaded model, and finds classes by their labels.

K experts, N classes, R classes of all experts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import sleep
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.errors import DSSError, Kind

Order = Literal["number", "class"]

EXPERTS_AT_ONCE = 64
LABELS_AT_ONCE = 4096
# A pause between parts of long work in a thread, so that the event loop can go on at once.
PAUSE_SECONDS = 0.0002


class ExpertNotFound(DSSError):
    kind = Kind.NOT_FOUND


class ClassNotFound(DSSError):
    kind = Kind.NOT_FOUND


class Matrix(NamedTuple):
    """How many classes of each range the experts of each range hold."""

    experts: NDArray[np.int64]  # [K] in the order of the rows
    expert_edges: NDArray[np.int64]  # [rows+1] where a row begins and ends in `experts`
    class_edges: NDArray[np.int64]  # [columns+1] the first class of each column, and N
    counts: NDArray[np.int64]  # [rows,columns]


@dataclass(frozen=True, eq=False)
class ClassIndex:
    """A bundle's index; it shares its arrays with the engine."""

    n_classes: int
    offsets: NDArray[np.int64]  # [K+1]
    classes: NDArray[np.int32]  # [R] expert e holds classes[offsets[e]:offsets[e+1]], ascending

    @property
    def n_experts(self) -> int:
        return len(self.offsets) - 1

    def expert(self, text: str) -> int:
        """The expert that a path names."""
        number = _number(text)
        if number is None or number >= self.n_experts:
            raise ExpertNotFound(
                f"There is no expert {text[:20]!r}; this model has 0 to {self.n_experts - 1}."
            )
        return number

    def find_class(self, text: str) -> int | None:
        """The class whose id is this text."""
        number = _number(text)
        return None if number is None or number >= self.n_classes else number

    def class_id(self, text: str) -> int:
        """The class that a path names."""
        number = self.find_class(text)
        if number is None:
            raise ClassNotFound(
                f"There is no class {text[:20]!r}; this model has 0 to {self.n_classes - 1}."
            )
        return number

    def held(self, expert: int) -> NDArray[np.int32]:
        """An expert's classes, ascending."""
        return self.classes[self.offsets[expert] : self.offsets[expert + 1]]

    def experts_of(self, classes: Sequence[int]) -> Mapping[int, list[int]]:
        """For each of these classes, the experts that hold it."""
        found: dict[int, list[int]] = {number: [] for number in classes}
        places = np.flatnonzero(np.isin(self.classes, np.array(classes, np.int32)))
        experts = np.searchsorted(self.offsets, places, side="right") - 1
        for number, expert in zip(self.classes[places].tolist(), experts.tolist(), strict=True):
            found[number].append(expert)
        return found

    def matrix(self, rows: int, columns: int, order: Order) -> Matrix:
        """Experts by classes, in at most so many rows and columns of equal size.

        In the order `class`, experts are sorted by the mean of their class ids, so that those that
        hold neighbouring classes are neighbours. Experts without any class come last.
        """
        experts = np.arange(self.n_experts)
        if order == "class":
            means = [self._mean_class(expert) for expert in range(self.n_experts)]
            experts = np.argsort(means, kind="stable")
        expert_edges = _edges(self.n_experts, rows)
        class_edges = _edges(self.n_classes, columns)
        counts = np.zeros((len(expert_edges) - 1, len(class_edges) - 1), np.int64)
        for row, (begin, end) in enumerate(_pairs(expert_edges)):
            for expert in experts[begin:end].tolist():
                # Classes ascend, so where the edges fall between them says how many lie between.
                counts[row] += np.diff(np.searchsorted(self.held(expert), class_edges))
            if row % EXPERTS_AT_ONCE == EXPERTS_AT_ONCE - 1:
                sleep(PAUSE_SECONDS)
        return Matrix(experts, expert_edges, class_edges, counts)

    def _mean_class(self, expert: int) -> float:
        held = self.held(expert)
        return float(held.mean()) if len(held) else float(self.n_classes)


def search_labels(labels: NDArray[np.object_], text: str, most: int) -> list[int]:
    """At most `most` classes whose labels contain the text, ignoring case.

    Equal labels come first, then those that begin with the text, each by class id. All labels are
    read one by one, in a thread: no second copy of them, and no sorted index, has to be kept.
    """
    wanted = text.casefold()
    if not wanted:
        return list(range(min(most, len(labels))))
    ranks: tuple[list[int], list[int], list[int]] = ([], [], [])
    for begin in range(0, len(labels), LABELS_AT_ONCE):
        found = labels[begin : begin + LABELS_AT_ONCE].tolist()
        for at in [i for i, label in enumerate(found) if wanted in label.casefold()]:
            rank = ranks[_rank(found[at].casefold(), wanted)]
            if len(rank) < most:
                rank.append(begin + at)
        if len(ranks[0]) == most:
            break
        sleep(PAUSE_SECONDS)
    return [number for rank in ranks for number in rank][:most]


def _rank(label: str, wanted: str) -> int:
    if label == wanted:
        return 0
    return 1 if label.startswith(wanted) else 2


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _edges(size: int, most: int) -> NDArray[np.int64]:
    """Where at most so many equal parts of 0..size begin and end."""
    parts = min(size, most)
    return np.arange(parts + 1) * size // parts


def _pairs(edges: NDArray[np.int64]) -> Iterable[tuple[int, int]]:
    return zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
