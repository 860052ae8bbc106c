"""Text of bundles and servers is printed so that a terminal obeys none of it."""

import json
import re
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from service import bundle, errors
from service.cli import inspect
from service.cli.group import CommandGroup
from service.cli.main import cli
from service.terminal.text import printable, printable_lines

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31mred\u202egnirts"
VISIBLE = r"\x1b]0;title\x07\x1b[2J\x9b31mred\u202egnirts"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # what our own drawings use


def obeyed(output: str) -> set[str]:
    """Characters that a terminal would obey."""
    return {c for c in COLOURS.sub("", output) if not c.isprintable() and c != "\n"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return bundle.write(
        tmp_path / "1",
        gate=np.ones((1, 2), np.float32),
        weight=np.eye(3, 2, dtype=np.float32),
        offsets=np.array([0, 3]),
        classes=np.arange(3, dtype=np.int32),
        n_classes=3,
        training=bundle.TrainingFacts(utilization=[1.0], flops_speedup=1.0),
        labels=[HOSTILE, "two", "three"],
        samples=np.array([[1, 0]], np.float32),
    ).path


def test_control_characters_become_visible() -> None:
    assert printable(HOSTILE) == VISIBLE
    assert printable("café 日本語 \U0001f600") == "café 日本語 \U0001f600"
    assert printable("a\nb\ud800") == r"a\nb\ud800"
    assert printable_lines("a\x1bb\nc\r") == "a\\x1bb\nc\\r"


@pytest.mark.parametrize("drawn", [False, True])
def test_labels_of_answers(folder: Path, drawn: bool) -> None:
    variables = {"FORCE_COLOR": "1", "COLUMNS": "200"} if drawn else {}
    result = CliRunner().invoke(cli, ["query", str(folder), "--sample", "-k", "3"], env=variables)
    assert result.exit_code == 0
    assert VISIBLE in result.output
    assert not obeyed(result.output)


def test_json_stays_json(folder: Path) -> None:
    result = CliRunner().invoke(cli, ["query", str(folder), "--sample", "-k", "3", "--json"])
    assert json.loads(result.output)["labels"][0][0] == HOSTILE
    assert not obeyed(result.output) - set(HOSTILE)


def test_facts_of_a_bundle(folder: Path) -> None:
    facts = inspect.describe(bundle.read(folder)) | {"created": HOSTILE}
    assert VISIBLE in inspect.table(facts) and not obeyed(inspect.table(facts))


def test_failures_that_quote_others() -> None:
    """Such as the detail of a server's answer."""

    @click.command()
    def fail() -> None:
        raise errors.DSSError(f"The server says: {HOSTILE}\nError: a second line")

    result = CliRunner().invoke(CommandGroup(commands={"fail": fail}), ["fail"])
    assert result.exit_code == 1
    assert result.output == rf"Error: The server says: {VISIBLE}\nError: a second line." + "\n"
