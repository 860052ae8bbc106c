"""`trainer.capture`: a trained model's hidden vectors, labels and head, in the files of a folder.

M rows, D hidden, N classes.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from math import floor
from pathlib import Path
from typing import Any, Literal

from torch import nn

from service import bars
from service.errors import DSSError
from trainer.capture_batches import Batch, DefaultLabels, Forward, Labels, run_model
from trainer.capture_files import SPLITS, CaptureFolder
from trainer.capture_model import find_head, fingerprint, untouched, watched
from trainer.capture_reader import STORED, Reader
from trainer.captures import Captured


class OptionWrong(DSSError):
    pass


class BatchesDiffer(DSSError):
    """A capture cannot go on with another model or other batches than it began with."""


class NothingCaptured(DSSError):
    pass


def capture(
    model: nn.Module,
    head: str | nn.Module,
    batches: Iterable[Batch],
    out: str | Path,
    *,
    limit: int | None = None,
    valid: float | Iterable[Batch] | None = None,
    dtype: Literal["fp32", "fp16"] = "fp32",
    labels: Labels | None = None,
    forward: Forward | None = None,
    shift: bool | None = None,
    ignore_index: int = -100,
    stateful: bool = False,
    progress: bool = True,
) -> Captured:
    """Run the model on batches and keep what its output layer is given, with the labels.

    `dss train --capture OUT` takes the folder. A capture that was interrupted goes on when it is
    called again in the same way, and ends with the same files as an unbroken one; the batches must
    come in the same order. The model is run in eval mode without gradients, and is left as it was.

    Args:
        head: the output layer, by name (as in `model.named_modules()`) or itself; an embedding if
            the model uses its rows in `torch.nn.functional.linear`
        batches: mappings, `(inputs, targets)` or tensors; `trainer/capture_batches.py` says what is
            made of each
        limit: at most so many rows of `batches`
        valid: batches to report accuracy on, or the share of `batches` to put aside for that: the
            first one, and others at equal distances
        dtype: how vectors are stored, fp32 or fp16
        labels: from a batch to a tensor with a class for each hidden vector, or `ignore_index`
        forward: calls the model on a batch, `forward(model, batch)`; what it returns is not used
        shift: whether the vector at t belongs to label t+1; by default what `DefaultLabels` finds
        ignore_index: the label of vectors to leave out
        stateful: whether `forward` carries something from batch to batch: batches that are in the
            files already are then run again
        progress: whether to show a bar, where there is a terminal
    """
    if dtype not in STORED:
        raise OptionWrong(f"dtype is {dtype!r}; fp32 or fp16 is expected.")
    if limit is not None and limit < 1:
        raise OptionWrong(f"limit is {limit}; at least 1 is expected.")
    share = float(valid) if isinstance(valid, float | int) else 0.0
    if isinstance(valid, float | int) and not 0 < share < 1:
        raise OptionWrong(f"valid is {valid}; batches, or a share between 0 and 1, are expected.")
    passes = [Pass("hidden vectors", batches, share, limit)]
    if valid is not None and not isinstance(valid, float | int):
        passes.append(Pass("validation", valid, 1.0, None))

    model = getattr(model, "_orig_mod", model)  # of a compiled one
    found = find_head(model, head)
    n_classes, hidden_size = found.weight.shape
    settings = {
        "head": found.name,
        "model": fingerprint(model),
        "dtype": dtype,
        "limit": limit,
        "valid": share if len(passes) == 1 else "batches",
        "shift": shift,
        "ignore_index": ignore_index,
    }
    chosen = labels or DefaultLabels(shift, ignore_index)
    reader = Reader(model, found, chosen, forward or run_model, ignore_index, STORED[dtype])
    folder = CaptureFolder(Path(out), hidden_size, STORED[dtype], settings)
    with closing(folder):
        try:
            with untouched(model), watched(found):
                _read_all(reader, folder, passes, stateful, progress)
        finally:
            folder.save()
        facts: dict[str, Any] = {
            "complete": True,
            "rows": folder.progress.rows["train"],
            "valid_rows": folder.progress.rows["valid"],
            "n_classes": n_classes,
            "hidden_size": hidden_size,
            "bias": found.bias is not None,
            **settings,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if isinstance(chosen, DefaultLabels):
            facts["shift"] = chosen.shift
        return folder.finish(*found.arrays(), facts)


@dataclass(frozen=True)
class Pass:
    """Batches that are read from first to last."""

    name: str
    batches: Iterable[Batch]
    aside: float  # share of them that goes to validation
    limit: int | None  # rows

    def split(self, number: int) -> str:
        """The first is put aside, so that there always is one, and others at equal distances."""
        aside = floor(number * self.aside) > floor((number - 1) * self.aside)
        return "valid" if aside else "train"

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


def _read_all(
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
