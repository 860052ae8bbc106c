"""README's commands, run as they stand in a fresh copy of the project; outputs must be true."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from helpers.doc_blocks import Block, assert_same, blocks_of
from helpers.paths import ROOT
from helpers.server import Running, free_port

README = (ROOT / "README.md").read_text()
BLOCKS = blocks_of(README)
SECONDS_TO_FIRST_ANSWER = 600  # packages are installed and loops compiled, beside other tests


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone would hold."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@contextmanager
def make_serve(checkout: Path) -> Iterator[Running]:
    """`make serve` in a fresh copy: it makes a virtual environment and installs what it needs."""
    port = free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DSS_")}
    log = checkout / "serve.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            ["make", "serve", f"PORT={port}"],
            cwd=checkout,
            env=clean,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    server = Running(f"http://127.0.0.1:{port}", port, process, log)
    try:
        server.wait_for("/readyz", seconds=SECONDS_TO_FIRST_ANSWER)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def test_readme_commands_do_what_it_says(checkout: Path) -> None:
    """All blocks in order: a server is started by the first command and answers those after it."""
    commands = [command for block in BLOCKS for command in block.commands]
    assert commands[0].line == "make serve"
    with make_serve(checkout) as server:
        assert not installed_in(checkout / ".venv", "torch")
        for block in BLOCKS:
            for arguments, output in to_run(block):
                here = f"127.0.0.1:{server.port}"
                found = run([part.replace("localhost:8000", here) for part in arguments], checkout)
                if output is not None:
                    assert_same(found, output)
        server.wait_for("/models/own")  # what README trained is served


def to_run(block: Block) -> Iterator[tuple[list[str], str | None]]:
    """A block's programs, each with the output that README shows, if it shows any."""
    if block.language == "console":
        for command in block.commands:
            if command.line != "make serve":
                yield ["bash", "-c", command.line], command.output
    elif block.language == "python":
        yield [sys.executable, "-c", block.text], None
    elif block.language == "sh":
        lines = [line for line in block.text.splitlines() if not line.startswith("dss serve")]
        yield ["bash", "-e", "-c", "\n".join(lines)], None


def run(arguments: list[str], folder: Path) -> str:
    # Training commands use the environment that runs this test.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        arguments,
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_readme_shows_a_client_and_a_model_of_ones_own() -> None:
    python = "".join(block.text for block in BLOCKS if block.language == "python")
    assert "service.client" in python and "trainer" in python


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 160
    tables = re.findall(r"(?:^\|.*\n)+", README, flags=re.MULTILINE)
    assert len(tables) == 1
    assert len(tables[0].splitlines()) <= 2 + 8


def test_the_query_of_readme_is_a_sample_of_the_demo() -> None:
    query = json.loads((ROOT / "examples" / "query.json").read_text())
    sample = np.load(ROOT / "models" / "demo" / "1" / "samples.npy")[1:2]
    assert np.allclose(query["inputs"], sample, rtol=1e-4)


def test_readme_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def installed_in(venv: Path, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([venv / "bin" / "python", "-c", code]).returncode == 0
