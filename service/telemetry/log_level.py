"""The log level, which can be changed while the server runs.

Each worker notes in its counters when it was told to change and to which level; once a second every
worker takes over the latest change.
"""

import logging
from time import time

from service.shared_state.counters import Counters

KEY = ("log level",)
CHANGED, LEVEL = 0, 1


class LogLevel:
    """The root logger's level, in all workers."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._own = counters.block(KEY, 2)

    @property
    def now(self) -> int:
        return logging.getLogger().level

    def change(self, level: int) -> None:
        self._own[LEVEL] = level
        self._own[CHANGED] = time()
        logging.getLogger().setLevel(level)

    def follow(self) -> None:
        """Take over the latest change of any worker."""
        blocks = (block.values for block in self._counters.blocks(KEY))
        latest = max(blocks, key=lambda values: values[CHANGED])
        if latest[CHANGED] and self.now != latest[LEVEL]:
            logging.getLogger().setLevel(int(latest[LEVEL]))
