import json
from pathlib import Path

import numpy as np
import pytest

from service.cells import PrivateCells, SharedCells, Sheet, totals

KEY = ("http", "/models/{name}/topk", "POST", "200")


def test_a_sheet_is_made_once() -> None:
    cells = PrivateCells()
    cells.sheet(KEY, 3)[1] += 2
    cells.sheet(("other",), 1)
    assert cells.sheet(KEY, 3).tolist() == [0, 2, 0]
    assert [sheet.key for sheet in cells.sheets()] == [KEY, ("other",)]
    assert [sheet.values.tolist() for sheet in cells.sheets(KEY)] == [[0, 2, 0]]


def test_what_one_worker_writes_all_read_at_once(tmp_path: Path) -> None:
    one, other = SharedCells(tmp_path, 0), SharedCells(tmp_path, 1)
    mine = one.sheet(KEY, 2)
    mine[0] = 7
    (found,) = other.sheets()
    assert (found.worker, found.key, found.values.tolist()) == (0, KEY, [7, 0])
    mine[1] = 0.5
    assert [sheet.values.tolist() for sheet in other.sheets(KEY)] == [[7, 0.5]]


@pytest.mark.parametrize("label", ["", "a" * 300, "../../é\n\"'", "x", "xy", "xyz"])
def test_any_label_is_kept_and_cells_are_aligned(tmp_path: Path, label: str) -> None:
    cells = SharedCells(tmp_path, 3)
    values = cells.sheet(("rejected", label), 1)
    values[0] = 1
    assert values.flags.aligned
    assert [sheet.key for sheet in cells.sheets()] == [("rejected", label)]
    (read,) = SharedCells(tmp_path, 4).sheets(("rejected", label))
    assert read.values[0] == 1


def test_a_file_says_what_it_holds(tmp_path: Path) -> None:
    SharedCells(tmp_path, 0).sheet(KEY, 2)[:] = (1, 2)
    (path,) = tmp_path.iterdir()
    line, cells = path.read_bytes().split(b"\n", 1)
    assert tuple(json.loads(line)) == KEY
    assert np.frombuffer(cells).tolist() == [1, 2]


def test_a_worker_goes_on_in_the_files_of_the_dead_one(tmp_path: Path) -> None:
    SharedCells(tmp_path, 0).sheet(KEY, 2)[:] = (1, 2)
    heir = SharedCells(tmp_path, 0)
    heir.sheet(KEY, 2)[0] += 1
    assert [sheet.values.tolist() for sheet in heir.sheets()] == [[2, 2]]


def test_a_sheet_may_need_more_cells_than_the_dead_ones(tmp_path: Path) -> None:
    SharedCells(tmp_path, 0).sheet(KEY, 1)[0] = 1
    assert SharedCells(tmp_path, 0).sheet(KEY, 3).tolist() == [1, 0, 0]


def test_totals_are_by_key() -> None:
    sheets = [
        Sheet(0, ("a",), np.array([1.0])),
        Sheet(0, ("b",), np.array([5.0])),
        Sheet(1, ("a",), np.array([2.0, 3.0])),
        Sheet(2, ("a",), np.array([4.0])),
    ]
    assert {key: values.tolist() for key, values in totals(sheets).items()} == {
        ("a",): [7, 3],
        ("b",): [5],
    }
    assert sheets[0].values.tolist() == [1], "what is read is not changed"
