"""Bars with the time left, on a terminal's stderr. Elsewhere nothing is drawn.

Loops inside loops share one display. It vanishes when the outermost one ends.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from service.terminal import console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Item = TypeVar("Item")


class Bar:
    """One that is not drawn."""

    def describe(self, text: str) -> None:
        pass

    def advance(self, steps: int = 1, **figures: str) -> None:
        pass


class _Drawn(Bar):
    def __init__(self, display: "Progress", task: "TaskID", *, steady: bool) -> None:
        self._display = display
        self._task = task
        self._steady = steady

    def describe(self, text: str) -> None:
        self._display.update(self._task, description=text)

    def advance(self, steps: int = 1, **figures: str) -> None:
        shown = "  ".join(f"{name} {value}" for name, value in figures.items())
        self._display.update(self._task, advance=steps, figures=shown, refresh=self._steady)


_display: "Progress | None" = None


@contextmanager
def bar(
    description: str, total: int | None, *, done: int = 0, steady: bool = False
) -> Iterator[Bar]:
    """A bar to advance; without a total it only shows that something goes on.

    A steady one is drawn when it advances and at no other time, so that what is timed between is
    not disturbed.
    """
    if not console.is_terminal(sys.stderr):
        yield Bar()
        return
    outermost = _display is None
    display = _display or _start(steady)
    task = display.add_task(description, total=total, completed=done, figures="")
    try:
        yield _Drawn(display, task, steady=steady)
    finally:
        if outermost:
            stop()
        else:
            display.remove_task(task)


def each(items: Sequence[Item], description: str, *, steady: bool = False) -> Iterator[Item]:
    with bar(description, len(items), steady=steady) as shown:
        for item in items:
            yield item
            shown.advance()


@contextmanager
def hidden() -> Iterator[None]:
    """Take the bars off the screen while something else is written."""
    if _display is not None:
        _display.stop()
    try:
        yield
    finally:
        if _display is not None:
            _display.start()


def stop() -> None:
    """Clear the display, if there is one: a loop that failed may have left it."""
    global _display
    display, _display = _display, None
    if display is not None:
        display.stop()


def _start(steady: bool) -> "Progress":
    global _display
    from rich import progress
    from rich.table import Column

    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    _display = progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(24),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(compact=True),
        progress.TextColumn("left", style="progress.remaining"),
        progress.TextColumn("{task.fields[figures]}", style="dim", markup=False, table_column=rest),
        console=console.console(sys.stderr),
        auto_refresh=not steady,
        expand=True,
        transient=True,
        redirect_stdout=False,  # it may be a file
    )
    _display.start()
    return _display
