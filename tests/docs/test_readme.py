"""README's commands, run as they stand in a fresh copy of the project; outputs must be true."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.doc_blocks import assert_same, blocks_of
from helpers.paths import ROOT
from helpers.server import Running, free_port

README = (ROOT / "README.md").read_text()
BLOCKS = blocks_of(README)
SECONDS_TO_FIRST_ANSWER = 120


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
    commands = [command for block in BLOCKS for command in block.commands]
    assert commands[0].line == "make serve"
    with make_serve(checkout) as server:
        assert not installed_in(checkout / ".venv", "torch")
        # Training commands use the environment that runs this test.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        for command in commands[1:]:
            done = subprocess.run(
                ["bash", "-c", command.line.replace("localhost:8000", f"127.0.0.1:{server.port}")],
                cwd=checkout,
                env=os.environ | {"PATH": path},
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stderr
            assert_same(done.stdout, command.output)


def test_readme_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in BLOCKS if block.language == "python"]
    assert blocks
    for block in blocks:
        exec(compile(block.text, "README.md", "exec"), {})  # noqa: S102


def test_readme_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def installed_in(venv: Path, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([venv / "bin" / "python", "-c", code]).returncode == 0
