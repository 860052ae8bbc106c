"""Labels of classes: their lengths, and their bytes in an answer."""

from pathlib import Path

import numpy as np
import orjson
import pytest
from helpers.altered_bundle import replace_file
from helpers.tiny_bundle import N_CLASSES

from service import bundle, errors
from service.bundle import labels as class_labels

EVERY_CHARACTER = [chr(number) for number in range(256) if chr(number) != "\n"]


@pytest.mark.parametrize(
    "labels",
    [
        [""],
        ["", "one", "three"],
        ['"quoted" and back\\slashed', "plain"],
        ["\x1b[31mred\x1b[0m\x00", "a long plain label"],
        ["日本語", "café", "\U0001f600"],
        EVERY_CHARACTER,
        ["".join(EVERY_CHARACTER)],
    ],
)
def test_the_longest_label_is_counted_as_json_writes_it(labels: list[str]) -> None:
    assert class_labels.json_bytes_most(labels) == max(len(orjson.dumps(label)) for label in labels)


def test_labels_are_counted_in_parts_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = ["x" * (number % 50) for number in range(700)]
    monkeypatch.setattr(class_labels, "LABELS_AT_ONCE", 64)
    assert class_labels.json_bytes_most(labels) == 51
    assert class_labels.json_bytes_most(np.array(labels, object).tolist()[49:50]) == 51
    assert class_labels.json_bytes_most([]) == 0


def test_a_label_longer_than_is_possible(folder: Path) -> None:
    lines = [f"class {number}" for number in range(N_CLASSES)]
    lines[3] = "é" * 2048
    replace_file(folder, "labels.txt", class_labels.encode(lines, N_CLASSES))
    assert bundle.read(folder).labels == tuple(lines)
    lines[3] += "e"
    with pytest.raises(errors.LabelsWrong, match=r"line 4 of labels\.txt has 4097 bytes"):
        class_labels.encode(lines, N_CLASSES)
    replace_file(folder, "labels.txt", "\n".join(lines).encode())
    with pytest.raises(errors.LabelsWrong, match=r"line 4 of labels\.txt has 4097 bytes"):
        bundle.read(folder)


@pytest.mark.parametrize(
    ("content", "labels"),
    [
        (b"", ("",)),
        (b"\n", ("",)),
        (b"a", ("a",)),
        (b"a\nb", ("a", "b")),
        (b"a\nb\n", ("a", "b")),
        (b"a\n\n", ("a", "")),
        (b"\n\n", ("", "")),
        ("a\rb\u2028c\x0bd\n\te".encode(), ("a\rb\u2028c\x0bd", "\te")),
    ],
)
def test_a_label_is_a_line(content: bytes, labels: tuple[str, ...]) -> None:
    assert class_labels.decode(content, len(labels)) == labels


def test_half_a_character_is_no_label(folder: Path) -> None:
    with pytest.raises(errors.LabelsWrong, match="lone surrogate"):
        class_labels.encode(["\ud800"] * N_CLASSES, N_CLASSES)
    replace_file(folder, "labels.txt", b"\xed\xa0\x80\n" * N_CLASSES)
    with pytest.raises(errors.LabelsWrong, match="not UTF-8"):
        bundle.read(folder)


def test_a_file_of_line_breaks_is_refused_before_it_becomes_strings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(class_labels, "_check_lengths", lambda _: pytest.fail("it was read"))
    replace_file(folder, "labels.txt", b"\n" * 100_000)
    with pytest.raises(errors.LabelsWrong, match="100000 lines for 12 classes"):
        bundle.read(folder)
