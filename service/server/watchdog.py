"""Ends a process whose event loop stands still, so that whoever started it starts it again."""

import faulthandler
import logging
import os
import threading

from service.telemetry import logging_setup

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
STATUS = 70  # EX_SOFTWARE


class Watchdog:
    """Counts its own looks rather than seconds: a process that was stopped, or a machine that
    slept, has not stood still for as long as the clock says."""

    def __init__(self, seconds: float, look_seconds: float = LOOK_SECONDS) -> None:
        self._looks = max(2, round(seconds / look_seconds))
        self._look_seconds = look_seconds
        self._beats = 0
        self._ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self) -> None:
        """The event loop has turned."""
        self._beats += 1

    def end(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        seen, quiet = -1, 0
        while not self._ended.wait(self._look_seconds):
            quiet = quiet + 1 if self._beats == seen else 0
            seen = self._beats
            if quiet >= self._looks:
                self._bite()

    def _bite(self) -> None:
        logger.critical("The event loop stands still: the process ends.")
        logging_setup.wait()
        faulthandler.dump_traceback(all_threads=True)
        os._exit(STATUS)
