"""A capture that was interrupted: it ends with the same bytes, or says why it cannot."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training.toy_models import Tied, Words, sentences
from torch import Tensor, nn

from trainer import capture
from trainer.capture import folder as captures
from trainer.capture import writer
from trainer.capture.folder import CaptureMissing, CaptureUnfinished, read_capture
from trainer.capture.passes import BatchesDiffer
from trainer.capture.writer import FolderTaken, GrowingArray

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "share": {"valid": 0.3},
    "validation": {"valid": sentences(3, seed=1)},
    "limit": {"limit": 100, "dtype": "fp16"},
}


def words_model() -> Words:
    torch.manual_seed(0)
    return Words()


def content(folder: Path) -> dict[str, bytes]:
    """All but the date."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".npy"}


def broken_after(count: int) -> Iterator[Tensor]:
    yield from sentences(6)[:count]
    raise KeyboardInterrupt


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("count", [1, 3])
def test_an_interrupted_capture_goes_on(
    tmp_path: Path, options: dict[str, Any], count: int
) -> None:
    whole = capture(words_model(), "head", sentences(6), tmp_path / "whole", **options)
    out = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        capture(words_model(), "head", broken_after(count), out, **options)
    with pytest.raises(CaptureUnfinished, match=r"call trainer\.capture again"):
        read_capture(out)
    read: list[int] = []

    def watched(model: nn.Module, batch: Tensor) -> None:
        read.append(1)
        model(batch)

    again = capture(words_model(), "head", sentences(6), out, forward=watched, **options)
    assert content(out) == content(tmp_path / "whole")
    assert (again.rows, again.valid_rows) == (whole.rows, whole.valid_rows)
    # Only the last batch that was there is run a second time.
    batches = 9 if "limit" not in options and isinstance(options.get("valid"), list) else 6
    batches = 5 if "limit" in options else batches
    assert len(read) == batches - count + 1


def test_a_killed_capture_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies behind the rows that count is cut off, wherever the writing was."""
    capture(words_model(), "head", sentences(6), tmp_path / "whole")
    monkeypatch.setattr(writer, "SAVED_EVERY", 0.0)
    out, copy = tmp_path / "out", tmp_path / "killed"

    def batches() -> Iterator[Tensor]:
        for number, words in enumerate(sentences(6)):
            if number == 4:
                shutil.copytree(out, copy)
            yield words

    capture(words_model(), "head", batches(), out)
    assert (copy / captures.PROGRESS).exists()
    for part in copy.glob("*.part"):
        with part.open("ab") as file:
            file.write(b"\x01" * 1001)
    capture(words_model(), "head", sentences(6), copy)
    assert content(copy) == content(tmp_path / "whole") == content(out)


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_an_interruption_at_the_very_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: int
) -> None:
    """Some files have their names already, and others not."""
    capture(words_model(), "head", sentences(3), tmp_path / "whole")
    left, finish, write_json = finished, GrowingArray.finish, writer.write_json

    def finish_some(self: GrowingArray, rows: int) -> None:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        finish(self, rows)

    def write_all_but_the_facts(path: Path, facts: dict[str, Any]) -> None:
        if path.name == captures.FACTS:
            raise KeyboardInterrupt
        write_json(path, facts)

    with monkeypatch.context() as patched:
        patched.setattr(GrowingArray, "finish", finish_some)
        patched.setattr(writer, "write_json", write_all_but_the_facts)
        with pytest.raises(KeyboardInterrupt):
            capture(words_model(), "head", sentences(3), tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.part"))) == 2 - finished
    capture(words_model(), "head", sentences(3), tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_the_bias_of_an_embedding_is_known_again(tmp_path: Path) -> None:
    """It is seen in a forward pass only, and here none is left to do."""
    torch.manual_seed(0)
    model = Tied()
    with pytest.raises(KeyboardInterrupt):
        capture(model, "embedding", broken_after(3), tmp_path)
    assert capture(model, "embedding", sentences(3), tmp_path).biased


def test_a_state_that_is_carried_along(tmp_path: Path) -> None:
    model = words_model()

    def carrying() -> Any:  # noqa: ANN401
        state: Any = None

        def forward(model: nn.Module, batch: Tensor) -> None:
            nonlocal state
            _, state = model(batch, state)

        return forward

    capture(model, "head", sentences(6), tmp_path / "whole", forward=carrying(), stateful=True)
    out = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        capture(model, "head", broken_after(3), out, forward=carrying(), stateful=True)
    capture(model, "head", sentences(6), out, forward=carrying(), stateful=True)
    assert content(out) == content(tmp_path / "whole")


# --- what cannot go on ------------------------------------------------------------------------


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    with pytest.raises(KeyboardInterrupt):
        capture(words_model(), "head", broken_after(3), tmp_path / "out")
    return tmp_path / "out"


def test_other_batches(broken: Path) -> None:
    before = {path.name: path.read_bytes() for path in broken.iterdir()}
    with pytest.raises(BatchesDiffer, match="Batch 0 gives other rows"):
        capture(words_model(), "head", sentences(6, seed=5), broken)
    with pytest.raises(BatchesDiffer, match="2 batches came, but 3"):
        capture(words_model(), "head", sentences(2), broken)
    assert {path.name: path.read_bytes() for path in broken.iterdir()} == before
    capture(words_model(), "head", sentences(6), broken)


def test_another_way_to_run_the_model(broken: Path) -> None:
    with pytest.raises(BatchesDiffer, match="Batch 2"):
        capture(words_model(), "head", sentences(6), broken, forward=lambda m, b: m(b.flip(1)))


def test_another_model_or_other_options(broken: Path) -> None:
    torch.manual_seed(1)
    with pytest.raises(FolderTaken, match="another model;"):
        capture(Words(), "head", sentences(6), broken)
    with pytest.raises(FolderTaken, match="another dtype and limit;"):
        capture(words_model(), "head", sentences(6), broken, dtype="fp16", limit=7)


def test_a_complete_capture_and_files_of_others(tmp_path: Path) -> None:
    capture(words_model(), "head", sentences(1), tmp_path / "out")
    before = content(tmp_path / "out")
    with pytest.raises(FolderTaken, match="complete capture"):
        capture(words_model(), "head", sentences(2), tmp_path / "out")
    assert content(tmp_path / "out") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "labels.npy").write_text("mine")
    with pytest.raises(FolderTaken, match=r"labels\.npy of its own"):
        capture(words_model(), "head", sentences(1), tmp_path / "mine")
    assert (tmp_path / "mine" / "labels.npy").read_text() == "mine"


def test_a_file_that_lost_rows(broken: Path) -> None:
    part = broken / "hidden.npy.part"
    part.write_bytes(part.read_bytes()[:-4])
    with pytest.raises(FolderTaken, match="has lost rows"):
        capture(words_model(), "head", sentences(6), broken)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CaptureMissing, match="holds no capture"):
        read_capture(tmp_path)
    (tmp_path / captures.FACTS).write_text("{}")
    with pytest.raises(CaptureMissing, match="is not what"):
        read_capture(tmp_path)
    (tmp_path / captures.FACTS).unlink()
    (tmp_path / captures.PROGRESS).write_text("{")
    with pytest.raises(FolderTaken, match="cannot be read"):
        capture(words_model(), "head", sentences(1), tmp_path)
