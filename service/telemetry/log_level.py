"""How much is logged, which may be changed while the server runs.

Several workers agree by cells: whoever was told last is right, and the others look once a second.
"""

import logging
from time import time

from service.shared_state.counters import Counters

KEY = ("log level",)
MOMENT, LEVEL = 0, 1


class LogLevel:
    """The root logger's level, in all workers."""

    def __init__(self, cells: Counters) -> None:
        self._cells = cells
        self._own = cells.block(KEY, 2)

    @property
    def now(self) -> int:
        return logging.getLogger().level

    def change(self, level: int) -> None:
        self._own[LEVEL] = level
        self._own[MOMENT] = time()
        logging.getLogger().setLevel(level)

    def follow(self) -> None:
        """Do as the worker that was told last."""
        told = max(
            (sheet.values for sheet in self._cells.blocks(KEY)), key=lambda cells: cells[MOMENT]
        )
        if told[MOMENT] and self.now != told[LEVEL]:
            logging.getLogger().setLevel(int(told[LEVEL]))
