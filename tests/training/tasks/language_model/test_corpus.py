"""Reading a corpus."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.training.tiny_corpus import WORDS

from trainer.tasks.language_model import corpus as corpora


def test_words_are_numbered_as_they_appear_with_eos_after_each_line(tmp_path: Path) -> None:
    (tmp_path / "wiki.train.tokens").write_text(" b a \n\n a <unk> b \n")
    (tmp_path / "wiki.valid.tokens").write_text("a\n")
    (tmp_path / "wiki.test.tokens").write_text("<unk> a")
    found = corpora.read(tmp_path)
    assert found.name == "wikitext"
    assert found.vocabulary == ("b", "a", "<eos>", "<unk>")
    assert found.splits["train"].tolist() == [0, 1, 2, 2, 1, 3, 0, 2]
    assert found.splits["valid"].tolist() == [1, 2]
    assert found.splits["test"].tolist() == [3, 1, 2]
    assert {tokens.dtype for tokens in found.splits.values()} == {np.dtype(np.int32)}


def test_counts_of_a_corpus_one_level_down(data: Path, corpus: corpora.Corpus) -> None:
    found = corpora.read(data.parent)
    assert {split: len(tokens) for split, tokens in found.splits.items()} == {
        "train": 16 + 80 * 7,
        "valid": 12 * 7,
        "test": 12 * 7,
    }
    assert found.vocabulary == corpus.vocabulary == (*WORDS, "<eos>")
    assert found.digest() == corpus.digest()


def test_a_given_vocabulary_sets_the_numbers(data: Path, corpus: corpora.Corpus) -> None:
    given = tuple(reversed(corpus.vocabulary))
    found = corpora.read(data, given)
    assert found.vocabulary == given
    assert [given[i] for i in found.splits["test"]] == [
        corpus.vocabulary[i] for i in corpus.splits["test"]
    ]
    assert found.digest() != corpus.digest()
    with pytest.raises(corpora.WordUnknown, match="'w3'"):
        corpora.read(data, [word for word in given if word != "w3"])


def test_what_is_no_corpus_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(corpora.CorpusMissing, match="not a folder"):
        corpora.read(tmp_path / "none")
    shutil.copytree(data, tmp_path / "second")
    with pytest.raises(corpora.CorpusAmbiguous, match="second"):
        corpora.read(tmp_path)
    (data / "ptb.valid.txt").write_bytes(b"")
    with pytest.raises(corpora.CorpusMalformed, match=r"ptb\.valid\.txt is empty"):
        corpora.read(data)
    (data / "ptb.valid.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(corpora.CorpusMalformed, match="UTF-8"):
        corpora.read(data)
    (data / "ptb.valid.txt").unlink()
    with pytest.raises(corpora.CorpusMissing, match=r"ptb\.\{train,valid,test\}\.txt"):
        corpora.read(data)
