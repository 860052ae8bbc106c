"""A few threads that make the engine calls of all models: no model has one of its own.

Models take turns: one that has more to compute after a call goes to the end of the line. A thread
that is stuck cannot be ended; it is given up, and another one is started in its place.
"""

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Self

logger = logging.getLogger(__name__)

LONG_NICENESS = 10

Turn = Callable[[], bool]  # makes one call, and says whether there is more to compute


class ThreadGroup:
    """At most so many threads; they are started when there is work for them, and then kept."""

    def __init__(self, name: str, most: int, niceness: int = 0) -> None:
        self._name = name
        self._most = most
        self._niceness = niceness  # how readily they leave a CPU to others
        self._changed = threading.Condition()
        self._turns: deque[Turn] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle: set[threading.Thread] = set()
        self._closed = False

    def start(self) -> None:
        """Starts the first thread, so that calls can be made even if no other can be started."""
        with self._changed:
            if not self._threads:
                self._start_thread()

    def submit(self, turn: Turn) -> None:
        with self._changed:
            self._turns.append(turn)
            if len(self._turns) > len(self._idle) and len(self._threads) < self._most:
                self._try_to_start_thread()
            self._changed.notify()

    def give_up(self, thread: threading.Thread) -> None:
        """Counts no longer on a thread. If it comes back, it ends."""
        with self._changed:
            self._threads.discard(thread)
            self._idle.discard(thread)
            if self._turns and len(self._threads) < self._most:
                self._try_to_start_thread()
            self._changed.notify_all()

    def close(self) -> None:
        """Lets the threads end once they have nothing to do."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _try_to_start_thread(self) -> None:
        try:
            self._start_thread()
        except RuntimeError:
            logger.warning(
                "No further thread can be started: %d compute for all models. Raise the limit of"
                " processes (pids) if answers are slow.",
                len(self._threads),
            )

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.discard(thread)
            raise

    def _work(self) -> None:
        if self._niceness and sys.platform == "linux":  # elsewhere it is the whole process's
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while (turn := self._next_turn()) is not None:
            if turn():
                with self._changed:
                    self._turns.append(turn)
            del turn  # nothing is kept while the thread waits

    def _next_turn(self) -> Turn | None:
        """Waits for it; None if this thread is to end."""
        thread = threading.current_thread()
        with self._changed:
            while thread in self._threads:
                if self._turns:
                    return self._turns.popleft()
                if self._closed:
                    self._threads.discard(thread)
                    break
                self._idle.add(thread)
                self._changed.wait()
                self._idle.discard(thread)
            self._changed.notify()  # another one, if this one was woken for a turn
        return None


class EngineThreads(NamedTuple):
    short: ThreadGroup  # for calls that others wait for
    long: ThreadGroup  # for calls that take long, in slices

    @classmethod
    def of(cls, cpus: int) -> Self:
        """Long calls leave a CPU to the short ones, if there are several."""
        long = ThreadGroup("engine, long calls", max(1, cpus - 1), LONG_NICENESS)
        return cls(ThreadGroup("engine", cpus), long)

    def start(self) -> None:
        for group in self:
            group.start()

    def close(self) -> None:
        for group in self:
            group.close()
