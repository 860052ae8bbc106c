"""Progress bars with the time left, on stderr if it is a terminal; elsewhere nothing is drawn.

Nested loops share one display, which is cleared when the outermost loop ends. Where nothing is
drawn, steps are only counted, and `phases.py` tells of them now and then.
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
    """What a loop advances."""

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


class _Counted(Bar):
    def __init__(self, description: str, total: int | None, done: int) -> None:
        self._description = description
        self._total = total
        self._done = done

    def __str__(self) -> str:
        if self._total is None:
            return self._description
        return f"{self._description}, {self._done:,} of {self._total:,}"

    def describe(self, text: str) -> None:
        self._description = text

    def advance(self, steps: int = 1, **_: str) -> None:
        self._done += steps


_display: "Progress | None" = None
_counted: list[_Counted] = []  # that are not drawn, the outermost first


@contextmanager
def bar(
    description: str, total: int | None, *, done: int = 0, steady: bool = False
) -> Iterator[Bar]:
    """A bar to advance; without a total it only shows that work is going on.

    A steady bar is drawn only when it advances, so that it does not disturb what is timed between.
    """
    if not console.is_terminal(sys.stderr):
        counted = _Counted(description, total, done)
        _counted.append(counted)
        try:
            yield counted
        finally:
            _counted.remove(counted)
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


def counted() -> str:
    """How far the outermost loop is that is not drawn, in words; empty if there is none."""
    return str(_counted[0]) if _counted else ""


@contextmanager
def hidden() -> Iterator[None]:
    """Clear the bars while something else is written."""
    if _display is not None:
        _display.stop()
    try:
        yield
    finally:
        if _display is not None:
            _display.start()


def stop() -> None:
    """Clear the display that a failed loop may have left."""
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
