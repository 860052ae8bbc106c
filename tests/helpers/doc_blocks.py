"""Documents whose code is run: their blocks, and whether an output is what they show."""

import json
import re
from dataclasses import dataclass, field

import pytest

BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", flags=re.DOTALL | re.MULTILINE)


@dataclass
class Command:
    line: str  # may go on over several, as in a shell
    output: str = ""


@dataclass
class Block:
    language: str  # "" if the document names none
    text: str
    number: int = 0  # of its first line
    commands: list[Command] = field(default_factory=list)  # of a console


def blocks_of(text: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(text):
        indent, language, body = match.groups()
        plain = "".join(line.removeprefix(indent) for line in body.splitlines(keepends=True))
        number = text.count("\n", 0, match.start()) + 1
        commands = console(plain) if language == "console" else []
        found.append(Block(language, plain, number, commands))
    return found


def console(text: str) -> list[Command]:
    """`$ command` lines, each followed by its output; `> ` goes on with a command."""
    commands: list[Command] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append(Command(line[2:]))
        elif line.startswith("> "):
            commands[-1].line += "\n" + line[2:]
        else:
            commands[-1].output += line + "\n"
    return commands


def assert_same(found: str, expected: str) -> None:
    """Equal but for rounding of floats, times and dates; `...` stands for anything."""
    if expected.startswith("{") and "..." not in expected:
        assert_close(json.loads(found), json.loads(expected))
        return
    found, expected = forget_times(found).rstrip(), forget_times(expected).rstrip()
    if "..." not in expected:
        assert found == expected, f"{found}\nis not\n{expected}"
        return
    pattern = ".*?".join(map(re.escape, expected.split("...")))
    assert re.fullmatch(pattern, found, flags=re.DOTALL), f"{found}\nis not\n{expected}"


def assert_close(found: object, expected: object) -> None:
    assert type(found) is type(expected)
    if isinstance(found, dict) and isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in found:
            assert_close(found[key], expected[key])
    elif isinstance(found, list) and isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(found, float):
        assert found == pytest.approx(expected, abs=1e-4)
    else:
        assert found == expected


def forget_times(text: str) -> str:
    text = re.sub(r"in \d+ s$", "in N s", text, flags=re.MULTILINE)
    return re.sub(r"\d{4}-\d\d-\d\dT[0-9:+]+", "DATE", text)
