"""The encoder and its file."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.tasks.language_model import corpus as corpora
from trainer.tasks.language_model import encoder as encoders
from trainer.tasks.language_model.encoder import Encoder


def test_an_encoder_survives_its_file(
    tmp_path: Path, encoder: Encoder, corpus: corpora.Corpus
) -> None:
    path = tmp_path / "encoder.npz"
    encoders.save(path, encoder, corpus.vocabulary)
    found, vocabulary = encoders.load(path)
    assert vocabulary == corpus.vocabulary
    assert found.state_dict().keys() == encoder.state_dict().keys()
    for name, weight in encoder.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight)
    words = torch.from_numpy(corpus.splits["test"]).long()[:, None]
    assert torch.equal(found(words)[0], encoder(words)[0])


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("vocab", None, "list of words"),
        ("vocab", lambda array: array[:-1], "emb.weight"),
        ("vocab", lambda array: np.full_like(array, "w"), "twice"),
        ("head.weight", None, "lacks"),
        ("head.weight", lambda array: array[:-1], "head.weight"),
        ("head.weight", lambda array: array[:, :0], "without columns"),
        ("lstm.bias_hh_l1", None, "lstm.bias_hh_l1"),
        ("lstm.bias_hh_l1", lambda array: array * np.nan, "not finite"),
        ("lstm.extra", lambda _: np.zeros(3), "lstm.extra"),
        ("emb.weight", lambda array: array.astype(object), "plain arrays"),
    ],
)
def test_a_wrong_encoder_is_refused(
    tmp_path: Path,
    encoder: Encoder,
    corpus: corpora.Corpus,
    name: str,
    change: Callable[[np.ndarray | None], np.ndarray] | None,
    sentence: str,
) -> None:
    path = tmp_path / "encoder.npz"
    encoders.save(path, encoder, corpus.vocabulary)
    with np.load(path) as file:
        arrays = dict(file)
    if change is None:
        del arrays[name]
    else:
        arrays[name] = change(arrays.get(name))
    np.savez(path, **arrays)
    with pytest.raises(encoders.EncoderMalformed, match=sentence):
        encoders.load(path)


def test_what_is_no_npz_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "encoder.npz"
    with pytest.raises(encoders.EncoderMalformed, match="no file"):
        encoders.load(path)
    np.save(tmp_path / "array.npy", np.zeros(3))
    for content in (b"", b"text", b"PK\x03\x04torn", (tmp_path / "array.npy").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(encoders.EncoderMalformed, match=r"no \.npz file"):
            encoders.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vocab", "words")
    with pytest.raises(encoders.EncoderMalformed, match="no array"):
        encoders.load(path)


def test_a_damaged_npz_is_refused(tmp_path: Path, encoder: Encoder, corpus: corpora.Corpus) -> None:
    path = tmp_path / "encoder.npz"
    encoders.save(path, encoder, corpus.vocabulary)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(encoders.EncoderMalformed, match="plain arrays"):
        encoders.load(path)
