"""What a capture refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training.toy_models import D, Images, N, Words, photographs, sentences
from torch import Tensor, nn

from service.errors import DSSError
from trainer import DSSoftmax, capture
from trainer.capture.batches import BatchUnclear, LabelsUnclear
from trainer.capture.capture import OptionWrong
from trainer.capture.model import HeadCalledAgain, HeadMissing, HeadNotCalled, HeadUnsuitable
from trainer.capture.passes import NothingCaptured
from trainer.capture.reader import CountsDiffer, LabelsOutOfRange
from trainer.capture.stored import VectorsNotFinite, VectorsTooLarge


def twice(model: Any, batch: Tensor) -> None:  # noqa: ANN401
    model(batch)
    model(batch)


def with_value(value: float) -> Words:
    model = Words()
    with torch.no_grad():
        model.lstm.flatten_parameters()
    model.dropout = nn.Identity()  # type: ignore[assignment]
    model.lstm.register_forward_hook(
        lambda _module, _inputs, output: (output[0] * value, output[1])
    )
    return model


class Rounded(nn.Module):
    """As quantised layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(N, D, dtype=torch.int8))


CASES: dict[str, tuple[type[DSSError], str, Callable[[Path], object]]] = {
    "no such head": (
        HeadMissing,
        r"no module 'haed'; near it are head; its linear layers are head \(8 to 30\)\.",
        lambda out: capture(Words(), "haed", sentences(1), out),
    ),
    "a head of another model": (
        HeadMissing,
        "a Linear that the model does not hold",
        lambda out: capture(Words(), nn.Linear(D, N), sentences(1), out),
    ),
    "no matrix": (
        HeadUnsuitable,
        "lstm is a LSTM without a plain matrix",
        lambda out: capture(Words(), "lstm", sentences(1), out),
    ),
    "whole numbers": (
        HeadUnsuitable,
        "is a Rounded without a plain matrix",
        lambda out: capture(nn.Sequential(nn.Linear(D, D), Rounded()), "1", sentences(1), out),
    ),
    "a sparse layer": (
        HeadUnsuitable,
        "1 is a sparse layer already",
        lambda out: capture(
            nn.Sequential(nn.Linear(D, D), DSSoftmax(D, N, 2)), "1", sentences(1), out
        ),
    ),
    "never called": (
        HeadNotCalled,
        "does not use head",
        lambda out: capture(
            Words(), "head", sentences(1), out, forward=lambda m, b: m.embedding(b)
        ),
    ),
    "rows never used": (
        HeadNotCalled,
        "does not use the rows of embedding",
        lambda out: capture(Words(), "embedding", sentences(1), out),
    ),
    "called twice": (
        HeadCalledAgain,
        "head is called 2 times",
        lambda out: capture(Words(), "head", sentences(1), out, forward=twice),
    ),
    "label too large": (
        LabelsOutOfRange,
        "Batch 0 has the label 30; head has the classes 0 to 29",
        lambda out: capture(Words(), "head", [(sentences(1)[0], sentences(1)[0] + 1)], out),
    ),
    "label below 0": (
        LabelsOutOfRange,
        "the label -1",
        lambda out: capture(Words(), "head", [(sentences(1)[0], -torch.ones(4, 7).long())], out),
    ),
    "labels for other vectors": (
        CountsDiffer,
        r"labels of shape \[4, 5\] for hidden vectors of shape \[4, 7\]",
        lambda out: capture(Words(), "head", [(sentences(1)[0], sentences(1)[0][:, :5])], out),
    ),
    "labels turned round": (
        CountsDiffer,
        r"labels of shape \[7, 4\]",
        lambda out: capture(Words(), "head", [(sentences(1)[0], sentences(1)[0].T)], out),
    ),
    "labels that are no classes": (
        LabelsUnclear,
        "float32; class ids are expected",
        lambda out: capture(Words(), "head", [(sentences(1)[0], torch.rand(4, 7))], out),
    ),
    "no labels": (
        LabelsUnclear,
        "pixel_values, and neither labels nor input_ids",
        lambda out: capture(Images(), "fc", [{"pixel_values": photographs(1)[0][0]}], out),
    ),
    "a batch of something": (
        LabelsUnclear,
        "a str in which no labels",
        lambda out: capture(Words(), "head", ["words"], out),
    ),
    "a batch of something, with labels": (
        BatchUnclear,
        "a str; give forward=",
        lambda out: capture(
            Words(), "head", ["words"], out, labels=lambda _: torch.zeros(1).long()
        ),
    ),
    "not finite": (
        VectorsNotFinite,
        "Batch 0 has a NaN",
        lambda out: capture(with_value(torch.nan), "head", sentences(1), out),
    ),
    "too large for float16": (
        VectorsTooLarge,
        "float16 cannot hold; choose dtype='fp32'",
        lambda out: capture(with_value(1e6), "head", sentences(1), out, dtype="fp16"),
    ),
    "nothing": (NothingCaptured, "No batch", lambda out: capture(Words(), "head", [], out)),
    "an unknown precision": (
        OptionWrong,
        "fp32 or fp16",
        lambda out: capture(Words(), "head", sentences(1), out, dtype="int8"),  # type: ignore[arg-type]
    ),
    "a share of 1": (
        OptionWrong,
        "between 0 and 1",
        lambda out: capture(Words(), "head", sentences(1), out, valid=1.0),
    ),
    "a limit of nothing": (
        OptionWrong,
        "at least 1",
        lambda out: capture(Words(), "head", sentences(1), out, limit=0),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_said_and_nothing_written(tmp_path: Path, case: str) -> None:
    kind, sentence, call = CASES[case]
    with pytest.raises(kind, match=sentence) as raised:
        call(tmp_path / "out")
    assert str(raised.value).endswith(".")
    assert not (tmp_path / "out").exists()


def test_all_of_a_single_batch_cannot_be_put_aside(tmp_path: Path) -> None:
    with pytest.raises(NothingCaptured, match="make batches smaller"):
        capture(Words(), "head", sentences(1), tmp_path, valid=0.5)
