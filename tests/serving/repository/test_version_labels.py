import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.repository import version_labels
from service.repository.version_labels import LABEL, LabelNotMoved, LabelsMalformed


def test_no_file_is_no_label(tmp_path: Path) -> None:
    assert version_labels.content(tmp_path) is None
    assert version_labels.parse(None) == {}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    wanted = {"stable": 2, "canary": 3, "a-b_9": 999_999_999}
    version_labels.write(tmp_path, wanted)
    assert version_labels.parse(version_labels.content(tmp_path)) == wanted
    version_labels.write(tmp_path, {})
    assert version_labels.parse(version_labels.content(tmp_path)) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["labels.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        '{"stable": 1',
        '{"stable": "1"}',
        '{"stable": true}',
        '{"stable": 1.0}',
        '{"stable": 0}',
        '{"stable": -1}',
        '{"stable": 1000000000}',
        '{"Stable": 1}',
        '{"": 1}',
        '{"1": 1}',
        '{"\u017ftable": 1}',
        '{"a/b": 1}',
        '{"..": 1}',
        '{"stable\\n": 1}',
        json.dumps({"a" * 33: 1}),
        json.dumps({f"label-{number}": 1 for number in range(65)}),
        "[" * 50_000,
        '"' + "a" * 70_000 + '"',
    ],
)
def test_what_cannot_be_is_refused_in_one_short_sentence(content: str) -> None:
    with pytest.raises(LabelsMalformed) as failure:
        version_labels.parse(content.encode())
    assert len(str(failure.value)) < 200


@given(st.binary(max_size=200))
def test_any_bytes_are_labels_or_malformed(content: bytes) -> None:
    try:
        found = version_labels.parse(content)
    except LabelsMalformed:
        return
    assert all(LABEL.fullmatch(label) and version >= 1 for label, version in found.items())


def test_a_pipe_in_the_files_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / version_labels.FILE)
    assert version_labels.content(tmp_path) is None


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(LabelNotMoved, match="No such file or directory"):
        version_labels.write(tmp_path / "gone", {"stable": 1})
