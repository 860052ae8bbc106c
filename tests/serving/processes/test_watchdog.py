"""The watchdog, in processes of their own."""

import subprocess
import sys
import textwrap


def run(program: str) -> "subprocess.CompletedProcess[str]":
    source = "import time\nfrom service.server.watchdog import Watchdog\n" + textwrap.dedent(
        program
    )
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60
    )


def test_a_loop_that_stands_still_ends_the_process_and_says_where() -> None:
    ended = run(
        """
        def stand_still():
            time.sleep(50)
        Watchdog(0.1, check_seconds=0.05).start()
        stand_still()
        """
    )
    assert ended.returncode == 70
    assert "in stand_still" in ended.stderr


def test_a_loop_that_turns_does_not() -> None:
    ended = run(
        """
        dog = Watchdog(0.4, check_seconds=0.05)
        dog.start()
        for _ in range(40):
            time.sleep(0.02)
            dog.beat()
        """
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_nobody_watches_after_the_end() -> None:
    ended = run(
        """
        dog = Watchdog(0.1, check_seconds=0.05)
        dog.start()
        dog.end()
        time.sleep(0.5)
        """
    )
    assert ended.returncode == 0
