"""The queue before the thread that writes log lines: nobody waits for a log that nobody reads."""

import logging
import os
import select
import threading
import time
from collections.abc import Iterator

import pytest
from helpers.blocked_pipe import Pipe

from service.telemetry import log_queue
from service.telemetry.log_queue import LogQueue


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("service.x", logging.INFO, "x.py", 1, message, arguments, None)


def queue_to(pipe: Pipe, room: int = log_queue.ROOM) -> LogQueue:
    queue = LogQueue(pipe.into, room)
    queue.setFormatter(logging.Formatter("%(message)s"))
    return queue


def test_lines_come_in_their_order_and_all_before_the_end(pipe: Pipe) -> None:
    queue = queue_to(pipe)
    for number in range(100):
        queue.handle(record("%d", number))
    queue.close()
    assert pipe.read_lines(100) == [str(number) for number in range(100)]


def test_a_log_that_nobody_reads_costs_lines_and_no_time(pipe: Pipe) -> None:
    queue, dropped = queue_to(pipe, room=10), []
    line = "x" * 1000
    while not pipe.is_full():
        queue.handle(record(line))
    begun = time.monotonic()
    for number in range(50):
        queue.handle(record("%d", number))
    queue.count_dropped(dropped.append)
    queue.handle(record("one more"))
    assert time.monotonic() - begun < 5
    assert len(dropped) == 2 and dropped[0] > 30 and dropped[1] == 1
    found = pipe.read_lines(11)  # what was kept, once somebody reads
    queue.handle(record("new"))
    while found[-1] != "new":
        found += pipe.read_lines(1)
    assert "one more" not in found
    queue.close()


def test_the_end_does_not_wait_for_a_reader(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_queue, "FLUSH_SECONDS", 0.1)
    queue = queue_to(pipe)
    for _ in range(20):
        queue.handle(record("x" * 1000))
    begun = time.monotonic()
    queue.close()
    assert time.monotonic() - begun < 5
    pipe.read_lines(20)


def test_processes_that_share_a_pipe_do_not_tear_lines(pipe: Pipe) -> None:
    """A pipe keeps a write together up to PIPE_BUF bytes, so lines are joined up to there."""
    queues = [queue_to(pipe) for _ in range(3)]
    lines = [f"{'abc'[i] * (1 + 97 * n % 3000)}" for n in range(100) for i in range(3)]

    def write_all() -> None:
        for number, line in enumerate(lines):
            queues[number % 3].handle(record(line))

    writing = threading.Thread(target=write_all)
    writing.start()
    found = pipe.read_lines(len(lines))
    writing.join()
    for queue in queues:
        queue.close()
    assert sorted(found) == sorted(lines)


def test_whoever_ends_hard_can_wait_for_the_log(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = queue_to(pipe)
    queue.handle(record("x"))
    queue.wait()
    assert select.select([pipe.out], [], [], 0)[0]
    monkeypatch.setattr(log_queue, "FLUSH_SECONDS", 0.1)
    for _ in range(20):
        queue.handle(record("x" * 1000))
    begun = time.monotonic()
    queue.wait()  # in vain
    assert time.monotonic() - begun < 5
    pipe.read_lines(21)
    queue.close()


def test_a_reader_that_is_gone_is_no_failure() -> None:
    closed = Pipe()
    os.close(closed.out)
    queue, dropped = queue_to(closed), []
    queue.count_dropped(dropped.append)
    queue.handle(record("x"))
    queue.close()
    os.close(closed.into)
    assert dropped == [1]


def test_a_pipe_that_does_not_block_loses_nothing(pipe: Pipe) -> None:
    os.set_blocking(pipe.into, False)
    queue = queue_to(pipe)
    for _ in range(50):
        queue.handle(record("x" * 1000))
    assert pipe.read_lines(50) == ["x" * 1000] * 50
    queue.close()


def test_a_wrong_call_is_logged_instead_of_raised(pipe: Pipe) -> None:
    queue = queue_to(pipe)
    queue.handle(record("%d rows", "no number"))
    queue.close()
    assert "'%d rows' could not be logged" in pipe.read_lines(1)[0]
