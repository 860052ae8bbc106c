"""Ends a process whose event loop is blocked, so that it is started again."""

import faulthandler
import logging
import os
import threading

from service.telemetry import logging_setup

logger = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
STATUS = 70  # EX_SOFTWARE


class Watchdog:
    """A thread that checks whether the event loop runs.

    It counts its checks rather than seconds: in a process that was stopped, or on a machine that
    was suspended, the loop was not blocked for as long as the clock says."""

    def __init__(self, seconds: float, check_seconds: float = CHECK_SECONDS) -> None:
        self._max_checks = max(2, round(seconds / check_seconds))
        self._check_seconds = check_seconds
        self._beats = 0
        self._ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self) -> None:
        """Called by the event loop, so it runs."""
        self._beats += 1

    def end(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        seen, unchanged = -1, 0
        while not self._ended.wait(self._check_seconds):
            unchanged = unchanged + 1 if self._beats == seen else 0
            seen = self._beats
            if unchanged >= self._max_checks:
                self._end_process()

    def _end_process(self) -> None:
        logger.critical("The event loop is blocked: the process ends, with a trace of its threads.")
        logging_setup.wait()
        faulthandler.dump_traceback(all_threads=True)
        os._exit(STATUS)
