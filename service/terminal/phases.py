"""The wall clock of a command's work, by phase.

Where stderr is no terminal, so that no bars are drawn, it gets a line for each phase and one every
half minute: a log shows what goes on, and how far it is.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from service.terminal import console, progress

EVERY = 30.0  # seconds without a line
LOOK_EVERY = 1.0
OTHER = "other"


class Phases:
    """Seconds of each phase. While a phase inside another one lasts, the outer clock stands."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic, every: float = EVERY) -> None:
        self.seconds: dict[str, float] = {}
        self._now = now
        self._every = every
        self._begun = self._charged = self._told = now()
        self._earlier = 0.0
        self._open: list[str] = []

    @property
    def total(self) -> float:
        """Seconds from the beginning, inside and outside of phases."""
        return self._earlier + self._now() - self._begun

    @property
    def spent(self) -> dict[str, float]:
        """Seconds by phase, which add up to the total; what was in none is "other"."""
        other = max(0.0, self.total - sum(self.seconds.values()))
        return self.seconds | {OTHER: other}

    def figures(self) -> dict[str, Any]:
        """For a summary: seconds in all, and by phase."""
        by_phase = {name: round(value, 1) for name, value in self.spent.items()}
        return {"seconds": round(self.total, 1), "phases": by_phase}

    def add_earlier(self, seconds: Mapping[str, float]) -> None:
        """Count what a run had taken before it was broken off."""
        for name, value in seconds.items():
            self._earlier += value
            if name != OTHER:  # which is what the phases leave of the total
                self.seconds[name] = self.seconds.get(name, 0.0) + value

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        self._tell(name)
        try:
            with self._watched():
                yield
        finally:
            self._charge()
            self._open.pop()

    def poll(self) -> None:
        """Tell how far the phase is, if nothing was told for so long."""
        if self._open and self._now() - self._told >= self._every:
            done = progress.counted()
            self._tell(f"{self._open[-1]}: {done}" if done else self._open[-1])

    def _charge(self) -> None:
        now = self._now()
        if self._open:
            name = self._open[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._charged
        self._charged = now

    def _tell(self, text: str) -> None:
        self._told = self._now()
        if not console.is_terminal(sys.stderr):
            click.echo(f"[{clock(self._told - self._begun)}] {text}", err=True)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """A thread tells, since what takes long may be one call of a library."""
        if len(self._open) > 1 or console.is_terminal(sys.stderr):
            yield
            return
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(min(LOOK_EVERY, self._every)):
            self.poll()


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
