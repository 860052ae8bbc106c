from pathlib import Path

import numpy as np
import pytest

from trainer.data import arrays
from trainer.data.arrays import chunks, open_head, open_vectors


def save(path: Path, array: object) -> Path:
    np.save(path, np.asarray(array))
    return path


@pytest.fixture
def hidden(tmp_path: Path) -> Path:
    return save(tmp_path / "hidden.npy", np.arange(12, dtype=np.float32).reshape(4, 3))


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    return save(tmp_path / "labels.npy", np.array([0, 1, 2, 1]))


@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_chunks_cover_everything_once_and_in_order(size: int) -> None:
    parts = list(chunks(10, size))
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(10))
    assert all(part.stop - part.start <= size for part in parts)
    assert not list(chunks(0, size))


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("label_kind", [np.uint8, np.int32, np.int64, np.uint64])
def test_vectors_stay_on_disk_as_they_are(tmp_path: Path, kind: type, label_kind: type) -> None:
    rows = np.arange(6, dtype=kind).reshape(3, 2)
    opened = open_vectors(
        save(tmp_path / "h.npy", rows),
        save(tmp_path / "y.npy", np.array([2, 0, 1], label_kind)),
        n_classes=300,  # more than a uint8 can hold
        hidden_size=2,
    )
    assert isinstance(opened.hidden, np.memmap) and isinstance(opened.labels, np.memmap)
    assert opened.hidden.dtype == kind and opened.labels.dtype == label_kind
    assert opened.hidden.tolist() == rows.tolist() and opened.labels.tolist() == [2, 0, 1]


def test_sizes_may_be_left_to_the_files(hidden: Path, labels: Path) -> None:
    assert open_vectors(hidden, labels, n_classes=None, hidden_size=None).hidden.shape == (4, 3)


def test_column_order_on_disk_changes_nothing(tmp_path: Path, labels: Path) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    path = save(tmp_path / "h.npy", np.asfortranarray(rows))
    opened = open_vectors(path, labels, n_classes=3, hidden_size=3)
    assert opened.hidden.tolist() == rows.tolist()
    weight = open_head(path).weight
    assert weight.flags.c_contiguous and weight.tolist() == rows.tolist()


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_a_head_is_float32_in_memory(tmp_path: Path, kind: type) -> None:
    path = save(tmp_path / "w.npy", np.ones((4, 3), kind))
    head = open_head(path)
    assert head.weight.dtype == np.float32 and type(head.weight) is np.ndarray
    assert head.weight.tolist() == np.ones((4, 3)).tolist() and head.bias is None
    head = open_head(path, save(tmp_path / "b.npy", np.arange(4, dtype=kind)))
    assert head.bias is not None and head.bias.dtype == np.float32
    assert head.bias.tolist() == [0, 1, 2, 3]


def refused(failure: type[arrays.VectorsInvalid], path: Path, hidden: Path, labels: Path) -> str:
    """The failure's text: one sentence that names the file."""
    with pytest.raises(failure) as caught:
        open_vectors(hidden, labels, n_classes=3, hidden_size=3)
    text = str(caught.value)
    assert str(path) in text and text.endswith(".") and "\n" not in text
    return text


@pytest.mark.parametrize("which", ["hidden", "labels"])
@pytest.mark.parametrize(
    ("content", "failure"),
    [
        (None, arrays.ArrayMissing),
        (b"", arrays.ArrayEmpty),
        (b"\x93NUMPY", arrays.NotNpy),
        (b"0.1 0.2\n", arrays.NotNpy),
        (b"PK\x03\x04 an archive", arrays.NotNpy),
        (b"\x93NUMPY\x01\x00\x08\x00{'a': (\n", arrays.NotNpy),
    ],
)
def test_files_that_are_no_array(
    tmp_path: Path,
    hidden: Path,
    labels: Path,
    which: str,
    content: bytes | None,
    failure: type[arrays.VectorsInvalid],
) -> None:
    path = tmp_path / "other.npy"
    if content is not None:
        path.write_bytes(content)
    refused(failure, path, *((path, labels) if which == "hidden" else (hidden, path)))


def test_folders_and_impossible_names_are_unreadable(tmp_path: Path, labels: Path) -> None:
    for path in (tmp_path, tmp_path / ("x" * 300)):
        refused(arrays.ArrayUnreadable, path, path, labels)


def test_an_array_cut_short(hidden: Path, labels: Path) -> None:
    hidden.write_bytes(hidden.read_bytes()[:-1])
    refused(arrays.NotNpy, hidden, hidden, labels)


def test_python_objects_are_never_unpickled(tmp_path: Path, labels: Path) -> None:
    path = tmp_path / "objects.npy"
    np.save(path, np.array([["a", None]], object), allow_pickle=True)
    refused(arrays.NotNpy, path, path, labels)


@pytest.mark.parametrize(
    ("array", "failure", "told"),
    [
        (np.zeros(3, np.float32), arrays.DimensionsWrong, "[3]"),
        (np.zeros((4, 3, 1), np.float32), arrays.DimensionsWrong, "[4, 3, 1]"),
        (np.float32(0), arrays.DimensionsWrong, "[]"),
        (np.zeros((0, 3), np.float32), arrays.ArrayEmpty, "[0, 3]"),
        (np.zeros((4, 0), np.float32), arrays.ArrayEmpty, "[4, 0]"),
        (np.zeros((4, 3)), arrays.TypeWrong, "float64"),
        (np.zeros((4, 3), np.int32), arrays.TypeWrong, "int32"),
        (np.zeros((4, 3), ">f4"), arrays.TypeWrong, "byte order"),
        (np.zeros((4, 2), np.float32), arrays.WidthsDisagree, "of 2 numbers, not of 3"),
        (np.zeros((5, 3), np.float32), arrays.LengthsDisagree, "5 rows"),
    ],
)
def test_hidden_vectors_of_another_kind(
    tmp_path: Path,
    labels: Path,
    array: np.ndarray,
    failure: type[arrays.VectorsInvalid],
    told: str,
) -> None:
    path = save(tmp_path / "h.npy", array)
    assert told in refused(failure, path, path, labels)


@pytest.mark.parametrize(
    ("array", "failure", "told"),
    [
        (np.zeros((4, 1), np.int64), arrays.DimensionsWrong, "[4, 1]"),
        (np.zeros(0, np.int64), arrays.ArrayEmpty, "[0]"),
        (np.zeros(4, np.float32), arrays.TypeWrong, "float32"),
        (np.zeros(4, bool), arrays.TypeWrong, "bool"),
        (np.zeros(4, "m8[s]"), arrays.TypeWrong, "timedelta64"),
        (np.zeros(3, np.int64), arrays.LengthsDisagree, "3 labels"),
        (np.array([0, 1, -1, 0]), arrays.LabelOutOfRange, "label -1 in row 2; 0 to 2"),
        (np.array([0, 1, 2, 3], np.uint8), arrays.LabelOutOfRange, "label 3 in row 3; 0 to 2"),
        (np.array([2**63, 0, 0, 0], np.uint64), arrays.LabelOutOfRange, f"label {2**63}"),
    ],
)
def test_labels_of_another_kind(
    tmp_path: Path,
    hidden: Path,
    array: np.ndarray,
    failure: type[arrays.VectorsInvalid],
    told: str,
) -> None:
    path = save(tmp_path / "y.npy", array)
    assert told in refused(failure, path, hidden, path)


def test_negative_labels_are_refused_even_if_classes_are_unknown(
    tmp_path: Path, hidden: Path
) -> None:
    path = save(tmp_path / "y.npy", np.array([0, 1000, -5, 0]))
    with pytest.raises(arrays.LabelOutOfRange, match="label -5 in row 2; 0 or more"):
        open_vectors(hidden, path, n_classes=None, hidden_size=None)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 16383, 16384, 39999])
def test_a_value_that_is_not_finite_is_found_anywhere(
    tmp_path: Path, kind: type, value: float, row: int
) -> None:
    rows = np.zeros((40000, 3), kind)
    rows[row, row % 3] = value
    path = save(tmp_path / "h.npy", rows)
    labels = save(tmp_path / "y.npy", np.zeros(40000, np.int8))
    assert f"in row {row}." in refused(arrays.ValueNotFinite, path, path, labels)


def test_a_wrong_label_is_found_beyond_the_first_chunk(tmp_path: Path) -> None:
    labels = np.zeros(40000, np.int64)
    labels[39999] = 3
    path = save(tmp_path / "y.npy", labels)
    hidden = save(tmp_path / "h.npy", np.zeros((40000, 3), np.float32))
    assert "label 3 in row 39999" in refused(arrays.LabelOutOfRange, path, hidden, path)


@pytest.mark.parametrize(
    ("weight", "bias", "failure"),
    [
        (np.zeros(4, np.float32), None, arrays.DimensionsWrong),
        (np.zeros((4, 3), np.int64), None, arrays.TypeWrong),
        (np.full((4, 3), np.nan, np.float32), None, arrays.ValueNotFinite),
        (np.full((4, 3), 1e300), None, arrays.ValueNotFinite),  # too large for float32
        (np.zeros((4, 3), np.float32), np.zeros((4, 1), np.float32), arrays.DimensionsWrong),
        (np.zeros((4, 3), np.float32), np.zeros(5, np.float32), arrays.ClassesDisagree),
        (np.zeros((4, 3), np.float32), np.full(4, np.inf), arrays.ValueNotFinite),
    ],
)
def test_heads_that_are_refused(
    tmp_path: Path,
    weight: np.ndarray,
    bias: np.ndarray | None,
    failure: type[arrays.VectorsInvalid],
) -> None:
    path = save(tmp_path / "w.npy", weight)
    with pytest.raises(failure, match=r"[wb]\.npy .*\.$"):
        open_head(path, None if bias is None else save(tmp_path / "b.npy", bias))
