"""Reads batches from first to last and writes what the head was given into the capture folder."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import floor

from service.errors import DSSError
from service.terminal import progress as bars
from trainer.capture.batches import Batch
from trainer.capture.folder import SPLITS
from trainer.capture.reader import Reader
from trainer.capture.writer import CaptureFolder


class BatchesDiffer(DSSError):
    """A capture cannot go on with another model or other batches than it began with."""


class NothingCaptured(DSSError):
    pass


@dataclass(frozen=True)
class Pass:
    """Batches that are read from first to last."""

    name: str
    batches: Iterable[Batch]
    aside: float  # share of them that goes to validation
    limit: int | None  # rows
    into: str = "train"  # the split that the others go to

    def split(self, number: int) -> str:
        """Of a share put aside: the first batch, and others at equal distances."""
        aside = floor(number * self.aside) > floor((number - 1) * self.aside)
        return "valid" if aside else self.into

    def bar(self, shown: bool) -> AbstractContextManager[bars.Bar]:
        """In rows up to the limit, or else in batches if it is known how many there are."""
        if not shown:
            return nullcontext(bars.Bar())
        total = self.limit if self.limit is not None else self.n_batches
        unit = "batches" if self.in_batches else "rows"
        return bars.bar(f"{self.name}, {unit}", total)

    @property
    def in_batches(self) -> bool:
        return self.limit is None and self.n_batches is not None

    @property
    def n_batches(self) -> int | None:
        try:
            return len(self.batches)  # type: ignore[arg-type]
        except TypeError:  # a generator, or a DataLoader of one
            return None


def read_all(
    reader: Reader, folder: CaptureFolder, passes: list[Pass], stateful: bool, progress: bool
) -> None:
    done, rows = folder.progress.batches, dict.fromkeys(SPLITS, 0)
    number = 0  # of a batch, over all passes
    for reading in passes:
        room = reading.limit
        with reading.bar(progress) as bar:
            for place, batch in enumerate(reading.batches):
                split = reading.split(place)
                wanted = reader.wanted(batch, number, room)
                vectors = None
                # The last one in the files is run again: the model may have changed.
                if stateful or number >= done - 1:
                    vectors = reader.vectors(batch, wanted, number)
                if vectors is not None and number >= done:
                    folder.append(split, vectors, wanted.labels)
                elif not folder.holds(split, rows[split], wanted.labels, vectors):
                    raise BatchesDiffer(
                        f"Batch {number} gives other rows than it gave to the capture in"
                        f" {folder.folder}; it needs the same batches in the same order."
                    )
                count = len(wanted.labels)
                rows[split] += count
                number += 1
                bar.advance(1 if reading.in_batches else count)
                if room is not None:
                    room -= count
                    if not room:
                        break
    if number < done:
        raise BatchesDiffer(f"{number} batches came, but {done} are in {folder.folder} already.")
    if not rows["train"]:
        why = ": all were put aside for validation; make batches smaller" if rows["valid"] else ""
        raise NothingCaptured(f"No batch has a row to train on{why}.")
