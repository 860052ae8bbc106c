import errno
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from service.shared_state.counters import Block, Counters, LocalCounters, SharedCounters, totals

KEY = ("http", "/models/{name}/topk", "POST", "200")


def test_a_sheet_is_made_once() -> None:
    counters = LocalCounters()
    counters.block(KEY, 3)[1] += 2
    counters.block(("other",), 1)
    assert counters.block(KEY, 3).tolist() == [0, 2, 0]
    assert [block.key for block in counters.blocks()] == [KEY, ("other",)]
    assert [block.values.tolist() for block in counters.blocks(KEY)] == [[0, 2, 0]]


def test_what_one_worker_writes_all_read_at_once(tmp_path: Path) -> None:
    one, other = SharedCounters(tmp_path, 0), SharedCounters(tmp_path, 1)
    mine = one.block(KEY, 2)
    mine[0] = 7
    (found,) = other.blocks()
    assert (found.worker, found.key, found.values.tolist()) == (0, KEY, [7, 0])
    mine[1] = 0.5
    assert [block.values.tolist() for block in other.blocks(KEY)] == [[7, 0.5]]


@pytest.mark.parametrize("label", ["", "a" * 300, "../../é\n\"'", "x", "xy", "xyz"])
def test_any_label_is_kept_and_counters_are_aligned(tmp_path: Path, label: str) -> None:
    counters = SharedCounters(tmp_path, 3)
    values = counters.block(("rejected", label), 1)
    values[0] = 1
    assert values.flags.aligned
    assert [block.key for block in counters.blocks()] == [("rejected", label)]
    (read,) = SharedCounters(tmp_path, 4).blocks(("rejected", label))
    assert read.values[0] == 1


def test_a_file_says_what_it_holds(tmp_path: Path) -> None:
    SharedCounters(tmp_path, 0).block(KEY, 2)[:] = (1, 2)
    (path,) = tmp_path.iterdir()
    line, counters = path.read_bytes().split(b"\n", 1)
    assert tuple(json.loads(line)) == KEY
    assert np.frombuffer(counters).tolist() == [1, 2]


def test_a_worker_goes_on_in_the_files_of_the_dead_one(tmp_path: Path) -> None:
    SharedCounters(tmp_path, 0).block(KEY, 2)[:] = (1, 2)
    successor = SharedCounters(tmp_path, 0)
    successor.block(KEY, 2)[0] += 1
    assert [block.values.tolist() for block in successor.blocks()] == [[2, 2]]


def test_a_block_may_need_more_cells_than_the_dead_ones(tmp_path: Path) -> None:
    SharedCounters(tmp_path, 0).block(KEY, 1)[0] = 1
    assert SharedCounters(tmp_path, 0).block(KEY, 3).tolist() == [1, 0, 0]


@pytest.mark.parametrize("shared", [False, True])
def test_a_dropped_sheet_is_gone_and_may_come_again(tmp_path: Path, shared: bool) -> None:
    counters: Counters = SharedCounters(tmp_path, 0) if shared else LocalCounters()
    values = counters.block(KEY, 2)
    values[0] = 1
    counters.block(("other",), 1)
    counters.drop(KEY)
    counters.drop(("never there",))
    values[1] = 1  # whoever still holds it may go on
    assert [block.key for block in counters.blocks()] == [("other",)]
    assert counters.block(KEY, 2).tolist() == [0, 0]


def test_dropping_leaves_what_other_workers_counted(tmp_path: Path) -> None:
    one, other = SharedCounters(tmp_path, 0), SharedCounters(tmp_path, 1)
    one.block(KEY, 1)[0] = 1
    other.block(KEY, 1)[0] = 2
    one.drop(KEY)
    assert [(block.worker, block.values.tolist()) for block in one.blocks()] == [(1, [2])]


def test_a_sheet_that_goes_while_all_are_read_is_passed_over(tmp_path: Path) -> None:
    one, other = SharedCounters(tmp_path, 0), SharedCounters(tmp_path, 1)
    one.block(("a",), 1)
    one.block(("b",), 1)
    reading = other.blocks()
    first = next(reading)
    one.drop(("a",))
    one.drop(("b",))
    assert first.key in {("a",), ("b",)}
    assert list(reading) == []


def test_without_room_a_worker_counts_for_itself_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = SharedCounters(tmp_path, 0), SharedCounters(tmp_path, 1)
    one.block(("before",), 1)[0] = 1

    def full(path: Path, content: bytes) -> int:
        del content
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(Path, "write_bytes", full)
        one.block(KEY, 2)[:] = (1, 2)
        one.block(("another",), 1)[0] = 3
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "No space left on device" in caplog.text
    one.block(KEY, 2)[0] += 1
    assert [block.values.tolist() for block in one.blocks(KEY)] == [[2, 2]]
    assert {block.key for block in one.blocks()} == {("before",), KEY, ("another",)}
    assert {block.key for block in other.blocks()} == {("before",)}
    assert len(list(tmp_path.iterdir())) == 1, "no unfinished file is left"
    one.drop(KEY)
    assert list(one.blocks(KEY)) == []


def test_room_is_taken_before_counters_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped page for which there is no block on the disk would end the process."""
    SharedCounters(tmp_path, 0).block(KEY, 1)[0] = 1
    (path,) = tmp_path.iterdir()
    before = path.stat().st_size

    def full(descriptor: int, offset: int, length: int) -> None:
        del descriptor, offset
        assert length > before
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    successor = SharedCounters(tmp_path, 0)
    successor.block(KEY, 1000)[999] = 5
    assert path.stat().st_size == before
    assert [block.values.sum() for block in successor.blocks()] == [1, 5], "what was counted stays"


def test_one_key_is_read_without_looking_at_all_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [SharedCounters(tmp_path, number, 2) for number in range(2)]
    for number, worker in enumerate(workers):
        worker.block(KEY, 1)[0] = number + 1
        worker.block(("another",), 1)
    monkeypatch.delattr(Path, "iterdir")
    read = [(block.worker, block.values.tolist()) for block in workers[0].blocks(KEY)]
    assert read == [(0, [1]), (1, [2])]
    assert list(workers[0].blocks(("never there",))) == []


def test_totals_are_by_key() -> None:
    sheets = [
        Block(0, ("a",), np.array([1.0])),
        Block(0, ("b",), np.array([5.0])),
        Block(1, ("a",), np.array([2.0, 3.0])),
        Block(2, ("a",), np.array([4.0])),
    ]
    assert {key: values.tolist() for key, values in totals(sheets).items()} == {
        ("a",): [7, 3],
        ("b",): [5],
    }
    assert sheets[0].values.tolist() == [1], "what is read is not changed"
