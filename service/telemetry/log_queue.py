"""A log handler whose lines are written by another thread, so that a blocked pipe blocks no caller.

The queue is bounded; lines beyond that are dropped and counted.
"""

import logging
import os
import select
import threading
from collections.abc import Callable
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any

ROOM = 4096  # lines that may wait
FLUSH_SECONDS = 2.0  # how long the end of the process may take

Entry = bytes | threading.Event | None  # a line; set once all before it is written; the end


class LogQueue(QueueHandler):
    def __init__(self, descriptor: int, room: int = ROOM) -> None:
        self._entries: SimpleQueue[Entry] = SimpleQueue()
        super().__init__(self._entries)
        self._room = room
        self._dropping = threading.Lock()
        self._dropped = 0
        self._on_dropped: Callable[[int], None] | None = None
        writer: Any = LineWriter(descriptor, self._drop)  # is given entries instead of records
        self._listener = QueueListener(self._entries, writer)
        self._listener.start()

    def count_dropped(self, count: Callable[[int], None]) -> None:
        """Call `count` with the number of lines dropped so far, and for each one to come."""
        with self._dropping:
            self._on_dropped = count
            if self._dropped:
                count(self._dropped)

    def prepare(self, record: logging.LogRecord) -> bytes:
        """Formats in the caller's thread: the line names the request that it handles."""
        try:
            text = self.format(record)
        except Exception as error:  # a wrong call must not cost an answer
            failed = logging.makeLogRecord(
                {
                    "name": record.name,
                    "levelno": logging.ERROR,
                    "levelname": "ERROR",
                    "msg": f"{str(record.msg)!r} could not be logged: {error!r}",
                }
            )
            text = self.format(failed)
        return text.encode("utf-8", "backslashreplace") + b"\n"

    def enqueue(self, record: Any) -> None:  # noqa: ANN401 - the line that `prepare` has made
        if self._entries.qsize() < self._room:  # exact: logging calls this under a lock
            self._entries.put(record)
        else:
            self._drop(1)

    def wait(self) -> None:
        """Until everything so far is written, or for a moment if nobody reads it."""
        written = threading.Event()
        self._entries.put(written)
        written.wait(FLUSH_SECONDS)

    def close(self) -> None:
        """Called by `logging` when the process ends. The listener's `stop` would wait forever."""
        self.wait()
        self._listener.enqueue_sentinel()
        super().close()

    def _drop(self, lines: int) -> None:
        with self._dropping:
            self._dropped += lines
            if self._on_dropped is not None:
                self._on_dropped(lines)


class LineWriter:
    """Writes each line by one call: a pipe that processes share keeps a short one together."""

    def __init__(self, descriptor: int, drop: Callable[[int], None]) -> None:
        self._descriptor = descriptor
        self._drop = drop

    def handle(self, entry: bytes | threading.Event) -> None:
        if isinstance(entry, threading.Event):
            entry.set()
        else:
            self._write(entry)

    def _write(self, line: bytes) -> None:
        # Not through sys.stderr: its lock, held in a write that never ends, would abort the exit.
        left = memoryview(line)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # someone has made the pipe they gave us non-blocking
                select.select([], [self._descriptor], [])
            except OSError:  # its reader is gone, or the disk is full
                self._drop(1)
                return
