"""Writes log lines in a thread of its own, so that a pipe nobody reads stops nobody else.

What waits to be written is bounded; lines beyond that are dropped and counted.
"""

import logging
import os
import select
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

ROOM = 4096  # lines that may wait
FLUSH_SECONDS = 2.0  # how long the end of the process may take

Entry = bytes | threading.Event | None  # a line; whom to tell that all before is written; the end


class LogWriter(logging.Handler):
    def __init__(self, descriptor: int, room: int = ROOM) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._room = room
        self._lines: SimpleQueue[Entry] = SimpleQueue()
        self._dropping = threading.Lock()
        self._dropped = 0
        self._tell: Callable[[int], None] | None = None
        self._thread = threading.Thread(target=self._work, name="log writer", daemon=True)
        self._thread.start()

    def count_dropped(self, tell: Callable[[int], None]) -> None:
        """Call `tell` with the number of lines dropped so far, and for every one to come."""
        with self._dropping:
            self._tell = tell
            if self._dropped:
                tell(self._dropped)

    def emit(self, record: logging.LogRecord) -> None:
        line = self._line(record)
        if self._lines.qsize() < self._room:  # exact: logging calls this under a lock
            self._lines.put(line)
        else:
            self._drop(1)

    def wait(self) -> None:
        """Until everything so far is written, for a process that is about to end hard."""
        told = threading.Event()
        self._lines.put(told)
        told.wait(FLUSH_SECONDS)

    def close(self) -> None:
        """Called by `logging` when the process ends; gives up if nobody reads."""
        self._lines.put(None)
        self._thread.join(FLUSH_SECONDS)
        super().close()

    def _line(self, record: logging.LogRecord) -> bytes:
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

    def _drop(self, lines: int) -> None:
        with self._dropping:
            self._dropped += lines
            if self._tell is not None:
                self._tell(lines)

    # --- the writer's thread -----------------------------------------------------------------

    def _work(self) -> None:
        """Lines are joined as long as a pipe keeps them together, whoever else writes to it."""
        chunk = b""
        while True:
            entry = self._next(wait=not chunk)
            if isinstance(entry, bytes) and 0 < len(entry) <= select.PIPE_BUF - len(chunk):
                chunk += entry
                continue
            if chunk:
                self._write(chunk)
                chunk = b""
            if entry is None:
                return
            if isinstance(entry, threading.Event):
                entry.set()
            else:
                chunk = entry

    def _next(self, *, wait: bool) -> Entry:
        """An entry, or nothing at all."""
        try:
            return self._lines.get(block=wait)
        except Empty:
            return b""

    def _write(self, chunk: bytes) -> None:
        # Not through sys.stderr: its lock, held in a write that never ends, would abort the exit.
        left = memoryview(chunk)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # someone has made the pipe they gave us non-blocking
                select.select([], [self._descriptor], [])
            except OSError:  # its reader is gone, or the disk is full
                self._drop(chunk.count(b"\n"))
                return
