"""The clock of a command's work, and what it tells where no bar is drawn."""

import re
import subprocess
import sys

import pytest

from service.terminal import progress
from service.terminal.phases import Phases, clock


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_phase_inside_another_has_its_own_seconds() -> None:
    now = Clock()
    phases = Phases(now=now)
    now.now += 1  # before any phase
    with phases.phase("learning"):
        now.now += 10
        with phases.phase("choosing classes"):
            now.now += 3
        now.now += 5
        with phases.phase("choosing classes"):
            now.now += 4
    with phases.phase("measuring"):
        now.now += 2.26
    assert phases.seconds == pytest.approx(
        {"learning": 15, "choosing classes": 7, "measuring": 2.26}
    )
    assert phases.figures() == {
        "seconds": 25.3,
        "phases": {"learning": 15.0, "choosing classes": 7.0, "measuring": 2.3, "other": 1.0},
    }


def test_a_phase_that_fails_is_counted_and_a_resumed_run_goes_on_with_it() -> None:
    now = Clock()
    broken = Phases(now=now)
    with pytest.raises(KeyboardInterrupt), broken.phase("learning"):
        now.now += 7
        raise KeyboardInterrupt
    resumed = Phases(now=now)
    resumed.add_earlier(broken.seconds)
    with resumed.phase("learning"):
        now.now += 2
    assert resumed.seconds == {"learning": 9.0}
    assert resumed.total == 9.0


def test_a_line_for_each_phase_and_every_half_minute(capfd: pytest.CaptureFixture[str]) -> None:
    now = Clock()
    phases = Phases(now=now)
    with phases.phase("clustering"):
        now.now += 29
        phases.poll()
        now.now += 1
        phases.poll()
        phases.poll()
    with phases.phase("learning"), progress.bar("epoch 1/5", 4000, done=10) as bar:
        for _ in range(1500):
            bar.advance()
        now.now += 31
        phases.poll()
        bar.describe("epoch 2/5")
        bar.advance()
        now.now += 3600
        phases.poll()
    assert capfd.readouterr() == (
        "",
        "[0:00:00] clustering\n"
        "[0:00:30] clustering\n"
        "[0:00:30] learning\n"
        "[0:01:01] learning: epoch 1/5, 1,510 of 4,000\n"
        "[1:01:01] learning: epoch 2/5, 1,511 of 4,000\n",
    )


WORK = """
import time
from service.terminal import progress
from service.terminal.phases import Phases

phases = Phases(every=0.2)
with phases.phase("clustering"):
    time.sleep(0.9)
with phases.phase("learning"):
    for _ in progress.each(range(1000), "steps"):
        pass
print("done")
"""


def test_into_a_pipe_goes_a_line_now_and_then_and_none_for_each_item() -> None:
    """Even while one call takes all the time; nothing of it is part of the result."""
    done = subprocess.run([sys.executable, "-c", WORK], capture_output=True, text=True, check=True)
    assert done.stdout == "done\n"
    lines = done.stderr.splitlines()
    assert all(re.fullmatch(r"\[0:00:0\d\] (clustering|learning)", line) for line in lines), lines
    told = [line.split("] ")[1] for line in lines]
    assert 2 <= told.count("clustering") <= 5
    assert told.count("learning") == 1 and told[-1] == "learning"


def test_hours_minutes_seconds() -> None:
    assert [clock(s) for s in (0, 59.9, 61, 3599, 36_061)] == [
        "0:00:00",
        "0:00:59",
        "0:01:01",
        "0:59:59",
        "10:01:01",
    ]
