"""The thread that writes log lines: nobody waits for a log that nobody reads."""

import logging
import os
import select
import threading
import time
from collections.abc import Iterator

import pytest
from helpers.blocked_pipe import Pipe

from service.telemetry import log_queue
from service.telemetry.log_queue import LogWriter


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("service.x", logging.INFO, "x.py", 1, message, arguments, None)


def written(pipe: Pipe, room: int = log_queue.ROOM) -> LogWriter:
    writer = LogWriter(pipe.into, room)
    writer.setFormatter(logging.Formatter("%(message)s"))
    return writer


def test_lines_come_in_their_order_and_all_before_the_end(pipe: Pipe) -> None:
    writer = written(pipe)
    for number in range(100):
        writer.handle(record("%d", number))
    writer.close()
    assert pipe.read_lines(100) == [str(number) for number in range(100)]


def test_a_log_that_nobody_reads_costs_lines_and_no_time(pipe: Pipe) -> None:
    writer, dropped = written(pipe, room=10), []
    line = "x" * 1000
    while not pipe.is_full():
        writer.handle(record(line))
    begun = time.monotonic()
    for number in range(50):
        writer.handle(record("%d", number))
    writer.count_dropped(dropped.append)
    writer.handle(record("one more"))
    assert time.monotonic() - begun < 5
    assert len(dropped) == 2 and dropped[0] > 30 and dropped[1] == 1
    found = pipe.read_lines(11)  # what was kept, once somebody reads
    writer.handle(record("new"))
    while found[-1] != "new":
        found += pipe.read_lines(1)
    assert "one more" not in found
    writer.close()


def test_the_end_does_not_wait_for_a_reader(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_queue, "FLUSH_SECONDS", 0.1)
    writer = written(pipe)
    for _ in range(20):
        writer.handle(record("x" * 1000))
    begun = time.monotonic()
    writer.close()
    assert time.monotonic() - begun < 5
    pipe.read_lines(20)


def test_processes_that_share_a_pipe_do_not_tear_lines(pipe: Pipe) -> None:
    """A pipe keeps a write together up to PIPE_BUF bytes, so lines are joined up to there."""
    writers = [written(pipe) for _ in range(3)]
    lines = [f"{'abc'[i] * (1 + 97 * n % 3000)}" for n in range(100) for i in range(3)]

    def write_all() -> None:
        for number, line in enumerate(lines):
            writers[number % 3].handle(record(line))

    writing = threading.Thread(target=write_all)
    writing.start()
    found = pipe.read_lines(len(lines))
    writing.join()
    for writer in writers:
        writer.close()
    assert sorted(found) == sorted(lines)


def test_whoever_ends_hard_can_wait_for_the_log(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = written(pipe)
    writer.handle(record("x"))
    writer.wait()
    assert select.select([pipe.out], [], [], 0)[0]
    monkeypatch.setattr(log_queue, "FLUSH_SECONDS", 0.1)
    for _ in range(20):
        writer.handle(record("x" * 1000))
    begun = time.monotonic()
    writer.wait()  # in vain
    assert time.monotonic() - begun < 5
    pipe.read_lines(21)
    writer.close()


def test_a_reader_that_is_gone_is_no_failure() -> None:
    closed = Pipe()
    os.close(closed.out)
    writer, dropped = written(closed), []
    writer.count_dropped(dropped.append)
    writer.handle(record("x"))
    writer.close()
    os.close(closed.into)
    assert dropped == [1]


def test_a_pipe_that_does_not_block_loses_nothing(pipe: Pipe) -> None:
    os.set_blocking(pipe.into, False)
    writer = written(pipe)
    for _ in range(50):
        writer.handle(record("x" * 1000))
    assert pipe.read_lines(50) == ["x" * 1000] * 50
    writer.close()


def test_a_wrong_call_is_logged_instead_of_raised(pipe: Pipe) -> None:
    writer = written(pipe)
    writer.handle(record("%d rows", "no number"))
    writer.close()
    assert "'%d rows' could not be logged" in pipe.read_lines(1)[0]
