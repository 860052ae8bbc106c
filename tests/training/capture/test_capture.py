"""`trainer.capture`: what is kept of a model's forward passes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.training.toy_models import D, Images, N, Tied, Words, photographs, sentences
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from service.terminal import progress
from trainer import capture
from trainer.capture import folder
from trainer.capture.passes import Pass
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
