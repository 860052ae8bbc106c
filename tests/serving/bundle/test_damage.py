"""Every way a bundle's files, manifest and arrays can be wrong is refused, by its own name."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.altered_bundle import Change, replace_file, rewrite_manifest, set_field
from helpers.tiny_bundle import N_CLASSES, WIDTH, write_tiny

from service import bundle, errors, npy
from service.bundle.format import MANIFEST

FILES = [
    MANIFEST,
    "gate.onnx",
    *(f"experts/00{expert}.onnx" for expert in range(3)),
    "experts/weights.bin",
    "index/offsets.npy",
    "index/classes.npy",
    "labels.txt",
    "samples.npy",
]


def test_the_list_of_files_is_complete(tiny: bundle.Bundle) -> None:
    present = {str(p.relative_to(tiny.path)) for p in tiny.path.rglob("*") if p.is_file()}
    assert present == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_byte_is_refused(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    step = max(1, len(content) // 200)
    for position in range(0, len(content), step):
        flipped = bytearray(content)
        flipped[position] ^= 1 << (position % 8)
        (folder / name).write_bytes(flipped)
        with pytest.raises(errors.BundleError) as refusal:
            bundle.read(folder)
        if name != MANIFEST:
            assert refusal.type is errors.ChecksumWrong
            assert name in str(refusal.value)


@pytest.mark.parametrize("name", FILES)
def test_any_truncation_is_refused(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    for length in {0, 1, len(content) // 2, len(content) - 1}:
        (folder / name).write_bytes(content[:length])
        with pytest.raises(errors.BundleError) as refusal:
            bundle.read(folder)
        if name != MANIFEST:
            assert refusal.type is errors.FileSizeWrong


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    expected = errors.BundleMissing if name == MANIFEST else errors.FileMissing
    with pytest.raises(expected):
        bundle.read(folder)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(errors.BundleMissing):
        bundle.read(tmp_path / "nothing")


def test_every_refusal_is_one_sentence(folder: Path) -> None:
    os.truncate(folder / "gate.onnx", 10)
    with pytest.raises(errors.FileSizeWrong) as refusal:
        bundle.read(folder)
    sentence = str(refusal.value)
    assert sentence.endswith(".") and "\n" not in sentence


# --- manifests that lie, with a right checksum ------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (set_field("head", False), errors.ManifestMalformed),
        (set_field("format_version", 2), errors.ManifestMalformed),
        (lambda f: f["files"].pop("head/head.onnx"), errors.FileSetWrong),
        (lambda f: f["files"]["head/weights.bin"].update(bytes=3), errors.ShapeWrong),
        (lambda f: f["files"]["head/weights.bin"].update(sha256="1" * 64), errors.ChecksumWrong),
    ],
)
def test_a_manifest_that_lies_about_its_head(
    tmp_path: Path,
    change: Change,
    expected: type[errors.BundleError],
) -> None:
    folder = write_tiny(tmp_path / "headed", head=np.ones((N_CLASSES, WIDTH), np.float32)).path
    rewrite_manifest(folder, change)
    with pytest.raises(expected):
        bundle.read(folder, head=True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (set_field("format_version", 5), errors.UnknownFormatVersion),
        (set_field("format_version", 4), errors.ManifestMalformed),
        (set_field("format_version", "1"), errors.UnknownFormatVersion),
        (set_field("head", True), errors.ManifestMalformed),
        (set_field("n_classes", 0), errors.ManifestMalformed),
        (set_field("n_classes", "many"), errors.ManifestMalformed),
        (set_field("surprise", 1), errors.ManifestMalformed),
        (set_field("expert_sizes", [5, 4]), errors.ShapeWrong),
        (set_field("expert_sizes", [5, 4, 13]), errors.ShapeWrong),
        (set_field("expert_sizes", [5, 4, -1]), errors.ShapeWrong),
        (set_field("expert_sizes", [0, 0, 0]), errors.ShapeWrong),
        (set_field("expert_sizes", [4, 5, 4]), errors.ShapeWrong),
        (set_field("n_classes", 11), errors.IndexOutOfRange),
        (set_field("n_classes", 13), errors.ShapeWrong),
        (set_field("hidden_size", 5), errors.ShapeWrong),
        (set_field("labels", False), errors.FileSetWrong),
        (set_field("samples", 3), errors.ShapeWrong),
        (lambda f: f["training"].update(utilization=[1.0]), errors.ShapeWrong),
        (lambda f: f["training"].update(flops_speedup=-1), errors.ManifestMalformed),
        (lambda f: f["files"].pop("gate.onnx"), errors.FileSetWrong),
    ],
)
def test_a_lying_manifest(
    folder: Path,
    change: Change,
    expected: type[errors.BundleError],
) -> None:
    rewrite_manifest(folder, change)
    with pytest.raises(expected) as refusal:
        bundle.read(folder)
    assert refusal.type is expected


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "experts/../../secret", "..\\secret", "C:\\secret"]
)
def test_a_path_that_leaves_the_folder(folder: Path, name: str) -> None:
    entry = {"sha256": "1" * 64, "bytes": 1}
    rewrite_manifest(folder, lambda fields: fields["files"].update({name: entry}))
    with pytest.raises(errors.PathLeavesBundle):
        bundle.read(folder)


def test_an_unexpected_file(folder: Path) -> None:
    entry = {"sha256": "1" * 64, "bytes": 1}
    rewrite_manifest(folder, lambda fields: fields["files"].update({"run.sh": entry}))
    with pytest.raises(errors.FileSetWrong, match=r"run\.sh"):
        bundle.read(folder)


def test_a_link_that_leaves_the_folder(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    shutil.copy(folder / "labels.txt", outside)
    (folder / "labels.txt").unlink()
    (folder / "labels.txt").symlink_to(outside)
    with pytest.raises(errors.PathLeavesBundle):
        bundle.read(folder)


def test_a_manifest_without_checksum(folder: Path) -> None:
    fields = json.loads((folder / MANIFEST).read_text())
    del fields["checksum"]
    (folder / MANIFEST).write_text(json.dumps(fields))
    with pytest.raises(errors.ManifestMalformed):
        bundle.read(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000])
def test_a_manifest_that_is_no_manifest(folder: Path, content: bytes) -> None:
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(errors.ManifestMalformed):
        bundle.read(folder)


@pytest.mark.parametrize(
    "content", [b"[" + b"[]," * 10**5 + b"0]", b"[" + b'"ab",' * 10**5 + b"0]"]
)
def test_a_manifest_that_unfolds_is_refused_before_it_is_parsed(
    folder: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / MANIFEST).write_bytes(content)
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("it was parsed"))
    with pytest.raises(errors.ManifestMalformed, match="too many values"):
        bundle.read(folder)


# --- values that would break what shows them --------------------------------------------------


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("\ud800", "lone surrogate"),
        ("2026\udfff", "lone surrogate"),
        ("\x1b]0;title\x07", "control character"),
        ("NUL\x00", "control character"),
        ("C1 \x9b31m", "control character"),
        ("two\nlines", "control character"),
        ("x" * 1001, "1001 characters"),
    ],
)
@pytest.mark.parametrize(
    "put",
    [
        lambda fields, value: fields.update(created=value),
        lambda fields, value: fields.update(producer=value),
        lambda fields, value: fields["training"].update(dataset=value),
        lambda fields, value: fields["training"].update(deep=[{"a": [value]}]),
        lambda fields, value: fields["training"].update({value: 1}),
        lambda fields, value: fields["files"].update({value: {}}),
    ],
)
def test_a_text_that_cannot_be_shown(
    folder: Path, put: Callable[[dict[str, Any], str], None], value: str, problem: str
) -> None:
    rewrite_manifest(folder, lambda fields: put(fields, value))
    with pytest.raises(errors.ManifestMalformed, match=problem) as refusal:
        bundle.read(folder)
    assert str(refusal.value).isascii() and str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 500


def test_texts_of_any_language(folder: Path) -> None:
    rewrite_manifest(folder, lambda fields: fields["training"].update(dataset="日本語, café 😀"))
    assert bundle.read(folder).manifest.training.model_extra == {"dataset": "日本語, café 😀"}


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), [{"a": float("nan")}], 10**30]
)
def test_a_number_that_is_none(folder: Path, value: object) -> None:
    rewrite_manifest(folder, lambda fields: fields["training"].update(measured=value))
    with pytest.raises(errors.ManifestMalformed, match="number"):
        bundle.read(folder)
    rewrite_manifest(folder, set_field("hidden_size", 10**30))
    with pytest.raises(errors.ManifestMalformed, match="number"):
        bundle.read(folder)


# --- arrays that lie --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 10, 12], errors.IndexOutOfRange),
        ([-1, 1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 10, 11], errors.IndexOutOfRange),
        ([0, 1, 2, 3, 3, 5, 6, 7, 8, 0, 9, 10, 11], errors.DuplicateClass),
        ([0, 1, 2, 4, 3, 5, 6, 7, 8, 0, 9, 10, 11], errors.ShapeWrong),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 10], errors.ShapeWrong),
    ],
)
def test_wrong_class_ids(
    folder: Path, classes: list[int], expected: type[errors.BundleError]
) -> None:
    replace_file(folder, "index/classes.npy", npy.write(np.array(classes, np.int32)))
    with pytest.raises(expected) as refusal:
        bundle.read(folder)
    assert refusal.type is expected


@pytest.mark.parametrize("offsets", [[0, 5, 9, 12], [1, 5, 9, 13], [0, 9, 5, 13], [0, 5, 13]])
def test_wrong_offsets(folder: Path, offsets: list[int]) -> None:
    replace_file(folder, "index/offsets.npy", npy.write(np.array(offsets, np.int64)))
    with pytest.raises(errors.ShapeWrong):
        bundle.read(folder)


def test_arrays_of_another_type_or_with_pickles(folder: Path) -> None:
    replace_file(folder, "index/classes.npy", npy.write(np.zeros(13, np.int64)))
    with pytest.raises(errors.ArrayMalformed):
        bundle.read(folder)
    pickled = folder / "pickled.npy"
    np.save(pickled, np.array([print] * 13, dtype=object), allow_pickle=True)
    replace_file(folder, "index/classes.npy", pickled.read_bytes())
    with pytest.raises(errors.ArrayMalformed):
        bundle.read(folder)


def test_labels(folder: Path) -> None:
    replace_file(folder, "labels.txt", b"one\ntwo\n")
    with pytest.raises(errors.LabelsWrong):
        bundle.read(folder)
    replace_file(folder, "labels.txt", b"\xff\n" * N_CLASSES)
    with pytest.raises(errors.LabelsWrong):
        bundle.read(folder)
