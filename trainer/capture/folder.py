"""A capture folder: a trained model's hidden vectors, labels and head. Read without PyTorch."""

import json
from dataclasses import dataclass
from pathlib import Path

from service.errors import DSSError

FACTS = "capture.json"  # written last: a folder without it is not complete
PROGRESS = "progress.json"  # until then: how far it has come
HIDDEN = "hidden.npy"  # [M,D]
LABELS = "labels.npy"  # [M]
SPLITS = ("train", "valid", "test")  # the last two are rows that were put aside
HEAD = "head.npy"  # [N,D]
BIAS = "bias.npy"  # [N], if the head has one
NAMES = "labels.txt"  # of the classes, if they are known: a line for each
HEADS_OWN = "the head's own"  # what `labels` of the facts says where nobody knows better ones


class CaptureMissing(DSSError):
    pass


class CaptureUnfinished(DSSError):
    pass


def split_file(folder: Path, split: str, name: str) -> Path:
    """Where the hidden vectors or the labels of a split are."""
    return folder / (name if split == "train" else f"{split}-{name}")


@dataclass(frozen=True)
class Captured:
    """What a complete folder holds."""

    folder: Path
    rows: int
    valid_rows: int
    n_classes: int
    hidden_size: int
    biased: bool
    test_rows: int = 0
    labels_are_heads: bool = False  # the head's first answers: they say nothing of its accuracy

    @property
    def hidden(self) -> Path:
        return self.folder / HIDDEN

    @property
    def labels(self) -> Path:
        return self.folder / LABELS

    @property
    def head(self) -> Path:
        return self.folder / HEAD

    @property
    def bias(self) -> Path | None:
        return self.folder / BIAS if self.biased else None

    @property
    def valid_hidden(self) -> Path | None:
        return split_file(self.folder, "valid", HIDDEN) if self.valid_rows else None

    @property
    def valid_labels(self) -> Path | None:
        return split_file(self.folder, "valid", LABELS) if self.valid_rows else None

    @property
    def test_hidden(self) -> Path | None:
        return split_file(self.folder, "test", HIDDEN) if self.test_rows else None

    @property
    def test_labels(self) -> Path | None:
        return split_file(self.folder, "test", LABELS) if self.test_rows else None


def read_capture(folder: Path) -> Captured:
    if not (folder / FACTS).exists():
        if (folder / PROGRESS).exists():
            raise CaptureUnfinished(
                f"The capture in {folder} has not finished; call trainer.capture again, or the"
                " command that began it, to go on."
            )
        raise CaptureMissing(f"{folder} holds no capture; trainer.capture writes one.")
    try:
        facts = json.loads((folder / FACTS).read_text())
        return Captured(
            folder,
            rows=facts["rows"],
            valid_rows=facts["valid_rows"],
            n_classes=facts["n_classes"],
            hidden_size=facts["hidden_size"],
            biased=facts["bias"],
            test_rows=facts.get("test_rows", 0),
            labels_are_heads=facts.get("labels") == HEADS_OWN,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CaptureMissing(f"{folder / FACTS} is not what trainer.capture writes.") from error
