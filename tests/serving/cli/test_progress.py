"""Bars are for a terminal, and never in the way of anything else."""

import io
import sys

import pytest

from service.terminal import messages, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def with_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called by each test, since pytest sets its own stderr between a fixture and its test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


def test_without_a_terminal_nothing_is_drawn(capfd: pytest.CaptureFixture[str]) -> None:
    assert list(progress.each([1, 2, 3], "counting")) == [1, 2, 3]
    with progress.bar("working", 2) as bar:
        bar.describe("still working")
        bar.advance(loss="1.5")
    assert capfd.readouterr() == ("", "")


def test_a_dumb_terminal_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = with_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    assert list(progress.each("ab", "counting")) == ["a", "b"]
    assert terminal.getvalue() == ""


def test_a_bar_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = with_terminal(monkeypatch)
    with progress.bar("epoch 1/2", 4, done=1, steady=True) as bar:
        bar.advance(speedup="2.0x")
        assert "2/4" in terminal.getvalue()
        assert "epoch 1/2" in terminal.getvalue()
        assert "speedup 2.0x" in terminal.getvalue()
        bar.describe("epoch 2/2")
        bar.advance()
        assert "epoch 2/2" in terminal.getvalue() and "3/4" in terminal.getvalue()
    assert progress._display is None


def test_loops_inside_loops_share_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    with_terminal(monkeypatch)
    with progress.bar("outer", 1, steady=True):
        display = progress._display
        for _ in progress.each([1], "inner", steady=True):
            assert progress._display is display
            assert display is not None
            assert [task.description for task in display.tasks] == ["outer", "inner"]
        assert display is not None
        assert [task.description for task in display.tasks] == ["outer"]
    assert progress._display is None


def test_a_loop_that_fails_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = with_terminal(monkeypatch)

    def fail() -> None:
        for _ in progress.each([1, 2], "failing"):
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    progress.stop()
    assert progress._display is None
    assert "\x1b[?25h" in terminal.getvalue()  # the cursor is shown again
    assert sys.stderr is terminal


def test_bars_make_room_for_what_is_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    terminal = with_terminal(monkeypatch)
    with progress.bar("working", 2, steady=True) as bar:
        messages.print_line("a line of the result")
        before = len(terminal.getvalue())
        messages.say("in between")
        said = terminal.getvalue()[before:]
        bar.advance()
    cleared = said.index("\x1b[2K")  # the bar's line, and the bar comes again below
    assert cleared < said.index("in between\n") < said.rindex("working")
    assert capfd.readouterr().out == "a line of the result\n"
    assert progress._display is None
