"""`trainer.capture`: what is kept of a model's forward passes; the model stays as it was."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.toy_models import D, Images, N, Tied, Words, photographs, sentences
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from service.errors import DSSError
from service.terminal import progress
from trainer import DSSoftmax, capture
from trainer.capture import folder
from trainer.capture.batches import BatchUnclear, LabelsUnclear
from trainer.capture.capture import OptionWrong
from trainer.capture.model import HeadCalledAgain, HeadMissing, HeadNotCalled, HeadUnsuitable
from trainer.capture.passes import NothingCaptured, Pass
from trainer.capture.reader import CountsDiffer, LabelsOutOfRange, VectorsNotFinite, VectorsTooLarge
from trainer.data.arrays import open_head, open_vectors


def load(path: Path) -> NDArray[Any]:
    return np.load(path, mmap_mode="r", allow_pickle=False)


def next_words(model: Words, batches: list[Tensor]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Hidden vectors of all words but a sentence's last, and the words after them."""
    model.eval()
    with torch.no_grad():
        hidden = [model.hidden(words)[0][:, :-1].reshape(-1, D) for words in batches]
    labels = [words[:, 1:].reshape(-1) for words in batches]
    return torch.cat(hidden).numpy(), torch.cat(labels).numpy()


# --- what is kept -----------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_a_word_model(tmp_path: Path, bias: bool) -> None:
    torch.manual_seed(0)
    model, batches = Words(bias), sentences(5)
    found = capture(model, "head", batches, tmp_path / "out")
    hidden, labels = next_words(model, batches)
    assert (found.rows, found.valid_rows) == (5 * 4 * 6, 0)
    assert (found.n_classes, found.hidden_size, found.biased) == (N, D, bias)
    np.testing.assert_allclose(load(found.hidden), hidden, atol=1e-6)
    assert np.array_equal(load(found.labels), labels)
    assert np.array_equal(load(found.head), model.head.weight.detach().numpy())
    if bias:
        assert found.bias is not None
        assert np.array_equal(load(found.bias), model.head.bias.detach().numpy())
    names = {"hidden.npy", "labels.npy", "head.npy", "capture.json"} | (
        {"bias.npy"} if bias else set()
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert folder.read_capture(tmp_path / "out") == found
    facts = json.loads((tmp_path / "out" / folder.FACTS).read_text())
    assert facts["complete"] is True and facts["head"] == "head"
    # What it wrote is what training takes.
    open_vectors(found.hidden, found.labels, n_classes=N, hidden_size=D)
    open_head(found.head, found.bias)


def test_logits_from_the_files_are_the_models(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = Words(), sentences(2)
    found = capture(model, model.head, batches, tmp_path)
    assert found.bias is not None
    logits = load(found.hidden) @ load(found.head).T + load(found.bias)
    with torch.no_grad():
        expected = torch.cat([model.eval()(words)[0][:, :-1].reshape(-1, N) for words in batches])
    np.testing.assert_allclose(logits[:, 1:], expected.numpy()[:, 1:], atol=1e-5)


def test_targets_of_their_own_and_some_left_out(tmp_path: Path) -> None:
    """Time first and targets in one row, as in PyTorch's own example of a word model."""
    torch.manual_seed(0)
    model = Words(batch_first=False)
    words, targets = sentences(2)
    targets = targets.clone()
    targets[1, 3:] = -100
    found = capture(model, "head", [(words, targets.reshape(-1))], tmp_path)
    with torch.no_grad():
        hidden = model.eval().hidden(words)[0]
    kept = targets != -100
    np.testing.assert_allclose(load(found.hidden), hidden[kept].numpy(), atol=1e-6)
    assert np.array_equal(load(found.labels), targets[kept].numpy())


def test_an_image_classifier(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = Images(), photographs(3)
    found = capture(model, "fc", batches, tmp_path)
    with torch.no_grad():
        expected = torch.cat([model.eval().features(images) for images, _ in batches])
    np.testing.assert_allclose(load(found.hidden), expected.numpy(), atol=1e-6)
    assert load(found.labels).tolist() == torch.cat([labels for _, labels in batches]).tolist()


def test_a_data_loader(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Words()
    loader = DataLoader(TensorDataset(torch.cat(sentences(3))), batch_size=5)
    found = capture(model, "head", loader, tmp_path)
    hidden, labels = next_words(model, list(torch.cat(sentences(3)).split(5)))
    np.testing.assert_allclose(load(found.hidden), hidden, atol=1e-6)
    assert np.array_equal(load(found.labels), labels)


def test_rows_of_an_embedding_as_the_head(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = Tied(), sentences(2)
    found = capture(model, "embedding", batches, tmp_path)
    with torch.no_grad():
        expected = torch.cat([model.hidden(words)[:, :-1].reshape(-1, D) for words in batches])
    np.testing.assert_allclose(load(found.hidden), expected.numpy(), atol=1e-6)
    assert found.bias is not None
    assert np.array_equal(load(found.head), model.embedding.weight.detach().numpy())
    assert np.array_equal(load(found.bias), model.bias.detach().numpy())


def test_a_linear_layer_tied_to_the_embedding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Words()
    model.head.weight = model.embedding.weight
    found = capture(model, "head", sentences(2), tmp_path)
    np.testing.assert_allclose(load(found.hidden), next_words(model, sentences(2))[0], atol=1e-6)


def test_other_batches_by_functions_of_the_user(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = Words(), sentences(2)
    texts = [{"text": words, "skip": 2} for words in batches]

    def labels(batch: dict[str, Any]) -> Tensor:
        wanted = torch.full((4, 7), -1)
        wanted[:, batch["skip"]] = 3
        return wanted

    found = capture(
        model,
        "head",
        texts,
        tmp_path,
        labels=labels,
        forward=lambda model, batch: model(batch["text"]),
        ignore_index=-1,
    )
    with torch.no_grad():
        expected = torch.cat([model.eval().hidden(words)[0][:, 2] for words in batches])
    np.testing.assert_allclose(load(found.hidden), expected.numpy(), atol=1e-6)
    assert set(load(found.labels).tolist()) == {3}


def test_float16_is_rounded_and_nothing_else(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Words()
    wide = capture(model, "head", sentences(2), tmp_path / "fp32")
    narrow = capture(model, "head", sentences(2), tmp_path / "fp16", dtype="fp16")
    assert load(narrow.hidden).dtype == np.float16
    assert np.array_equal(load(narrow.hidden), load(wide.hidden).astype(np.float16))
    assert load(narrow.head).dtype == np.float32


def test_a_limit_cuts_a_batch(tmp_path: Path) -> None:
    model, read = Words(), []

    def batches() -> Any:  # noqa: ANN401
        for number, words in enumerate(sentences(5)):
            read.append(number)
            yield words

    found = capture(model, "head", batches(), tmp_path, limit=30)
    hidden, labels = next_words(model, sentences(2))
    assert found.rows == 30 and read == [0, 1]
    np.testing.assert_allclose(load(found.hidden), hidden[:30], atol=1e-6)
    assert np.array_equal(load(found.labels), labels[:30])


def test_a_share_of_the_batches_is_put_aside(tmp_path: Path) -> None:
    model, batches = Words(), sentences(9)
    found = capture(model, "head", batches, tmp_path, valid=0.25)
    aside = [0, 4, 8]
    assert found.valid_hidden is not None and found.valid_labels is not None
    for files, numbers in (
        ((found.valid_hidden, found.valid_labels), aside),
        ((found.hidden, found.labels), [n for n in range(9) if n not in aside]),
    ):
        hidden, labels = next_words(model, [batches[number] for number in numbers])
        np.testing.assert_allclose(load(files[0]), hidden, atol=1e-6)
        assert np.array_equal(load(files[1]), labels)


def test_validation_batches_of_their_own(tmp_path: Path) -> None:
    """The limit is one of the batches to train on."""
    model, others = Words(), sentences(2, seed=1)
    found = capture(model, "head", sentences(3), tmp_path, valid=others, limit=10)
    assert (found.rows, found.valid_rows) == (10, 48)
    assert found.valid_labels is not None
    assert np.array_equal(load(found.valid_labels), next_words(model, others)[1])


def test_the_bar_knows_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int | None]] = []

    @contextmanager
    def noted(description: str, total: int | None) -> Iterator[progress.Bar]:
        seen.append((description, total))
        yield progress.Bar()

    monkeypatch.setattr(progress, "bar", noted)
    for batches, limit in (([1, 2, 3], None), ([1, 2, 3], 70), (iter([1, 2]), None)):
        reading = Pass("vectors", batches, 0.0, limit)
        with reading.bar(shown=True), reading.bar(shown=False):
            pass
    assert seen == [("vectors, batches", 3), ("vectors, rows", 70), ("vectors, rows", None)]


# --- the model stays as it was ----------------------------------------------------------------


def everything(model: nn.Module) -> dict[str, Any]:
    """All that a capture could change."""
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "same tensors": [id(value) for value in (*model.parameters(), *model.buffers())],
        "modes": [module.training for module in model.modules()],
        "needs": [parameter.requires_grad for parameter in model.parameters()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [
            (len(module._forward_hooks), len(module._forward_pre_hooks))
            for module in model.modules()
        ],
        "random": torch.get_rng_state(),
        "gradients": torch.is_grad_enabled(),
    }


def assert_same(before: object, after: object) -> None:
    if isinstance(before, dict) and isinstance(after, dict):
        assert before.keys() == after.keys()
        for name in before:
            assert_same(before[name], after[name])
    elif isinstance(before, list) and isinstance(after, list):
        assert len(before) == len(after)
        for one, other in zip(before, after, strict=True):
            assert_same(one, other)
    elif isinstance(before, Tensor) and isinstance(after, Tensor):
        assert torch.equal(before, after)
    else:
        assert before == after


def model_in_training() -> Images:
    torch.manual_seed(0)
    model = Images()
    model(torch.randn(5, 1, 8, 8)).sum().backward()
    model.features[1].eval()  # a frozen part
    model.features[0].weight.requires_grad_(False)
    model.fc.register_forward_hook(lambda *_: None)
    return model


def test_a_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = model_in_training()
    before = everything(model)
    loader = DataLoader(TensorDataset(*(map(torch.cat, zip(*photographs(3), strict=True)))), 4)
    capture(model, "fc", loader, tmp_path)
    assert_same(before, everything(model))


@pytest.mark.parametrize("head", ["fc", "embedding"])
def test_a_model_is_left_as_it_was_by_a_failure(tmp_path: Path, head: str) -> None:
    def batches() -> Any:  # noqa: ANN401
        yield from photographs(2) if head == "fc" else sentences(2)
        torch.randn(3)
        raise KeyboardInterrupt

    model = model_in_training() if head == "fc" else Tied()
    before = everything(model)
    with pytest.raises(KeyboardInterrupt):
        capture(model, head, batches(), tmp_path)
    assert_same(before, everything(model))


def test_a_table_that_grows_is_not_shrunk(tmp_path: Path) -> None:
    """A module that has grown its buffer counts on it by flags of its own."""

    class Growing(Words):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(2))

        def forward(self, tokens: Tensor, state: object = None) -> tuple[Tensor, object]:
            self.table = torch.zeros(tokens.shape[1])
            return super().forward(tokens, state)

    model = Growing()
    capture(model, "head", sentences(1), tmp_path)
    assert len(model.table) == 7


# --- what is refused --------------------------------------------------------------------------


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


# --- where it is found ------------------------------------------------------------------------


def test_the_package_is_light_and_its_name_is_the_function() -> None:
    code = (
        "import sys, trainer\n"
        "assert 'torch' not in sys.modules\n"
        "import trainer.capture.capture, trainer.capture.folder\n"
        "from trainer import DSSoftmax, capture\n"
        "assert callable(trainer.capture) and trainer.capture is capture\n"
        "assert isinstance(DSSoftmax, type)\n"
        "print(hasattr(trainer, 'nonsense'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
