"""Every code block of the documentation, run as it stands; what it shows must come out.

A page's blocks run in order in a folder of their own, in which `models/` holds the demo. A server
on it answers at localhost:8000 (the port is replaced), unless the page starts one itself: a
`dss serve` goes on beside the blocks that follow it.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml
from helpers.doc_blocks import BLOCK, Block, assert_same, blocks_of
from helpers.paths import ROOT
from helpers.server import Running, free_port, wait_until

PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "models" / "FORMAT.md"])
HERE = "localhost:8000"
SERVE = "dss serve"
SERVES = re.compile(rf"([A-Z_]+=\S* )*{SERVE}\b")
SECONDS = 240  # for one command
SHELL = ("console", "sh")
RUN = (*SHELL, "python")
SHOWN = ("text", "mermaid")  # nothing to run or to parse
# Pages whose blocks cannot be run here, or would take hours; each says who tries them instead.
ELSEWHERE = {
    "chaos.md": "benchmarks.chaos: 50 minutes; quick forms are among the tests",
    "deploy.md": "needs a container engine; tests/deployment/test_compose.py and make image-test",
    "kubernetes.md": "needs a cluster; tests/deployment",
    "performance.md": "benchmarks of hours; tests/benchmarking runs them in small",
    "reproduce.md": "hours, and corpora; tests/training/tasks runs it in small",
    "scaling.md": "a benchmark of minutes that wants a quiet machine",
}


def ids(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_links_lead_somewhere(path: Path) -> None:
    text = BLOCK.sub("", path.read_text())
    for target, _, place in re.findall(r"\]\(([^)#\s]*)(#([^)]*))?\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        found = path.parent / target if target else path
        assert found.exists(), target
        if place:
            assert place in headings(found.read_text()), f"{target}#{place}"


def headings(text: str) -> set[str]:
    """As addresses, the way they are made of headings on the web."""
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_blocks_are_what_they_say(path: Path) -> None:
    for block in blocks_of(path.read_text()):
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "yaml":
            yaml.safe_load(block.text)
        elif path.name not in ELSEWHERE:
            assert block.language in (*RUN, *SHOWN), f"{path.name}:{block.number}"


def with_code() -> list[Path]:
    pages = [path for path in PAGES if path.name not in ELSEWHERE]
    return [p for p in pages if any(b.language in RUN for b in blocks_of(p.read_text()))]


@pytest.mark.parametrize("path", with_code(), ids=ids)
def test_code_does_what_it_says(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [block for block in blocks_of(path.read_text()) if block.language in RUN]
    shutil.copytree(ROOT / "models" / "demo", tmp_path / "models" / "demo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith("DSS_")]:
        monkeypatch.delenv(name)
    with ExitStack() as servers:
        page = Page(path.name, tmp_path, servers)
        text = "".join(block.text for block in blocks)
        if HERE in text and not re.search(rf"^(\$ )?{SERVES.pattern}", text, re.MULTILINE):
            page.start(f"{SERVE} --models models")
        for block in blocks:
            page.run(block)


class Page:
    def __init__(self, name: str, folder: Path, servers: ExitStack) -> None:
        self.name = name
        self._folder = folder
        self._servers = servers
        self._port = free_port()
        self._namespace: dict[str, object] = {"__name__": "__main__"}

    def run(self, block: Block) -> None:
        where = f"{self.name}:{block.number}"
        if block.language == "python":
            code = compile(self._here(block.text), where, "exec")
            exec(code, self._namespace)  # noqa: S102
        elif block.language == "sh":
            self._shell(block.text, where)
        else:
            for command in block.commands:
                output = self._shell(command.line, where)
                if command.output:
                    assert_same(output, self._here(command.output))

    def _shell(self, line: str, where: str) -> str:
        if SERVES.match(line):
            self.start(line)
            return ""
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", self._here(line)],
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{where}: {line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, line: str) -> None:
        """A server beside what follows, at another port than the page says."""
        words = shlex.split(line)
        env = dict(word.split("=", 1) for word in words[: words.index("dss")])
        self._port = free_port()
        arguments = words[len(env) + 2 :]
        self._servers.enter_context(serving(arguments, env, self._port, self._folder))

    def _here(self, text: str) -> str:
        return text.replace(HERE, f"localhost:{self._port}")


@contextmanager
def serving(
    arguments: list[str], env: dict[str, str], port: int, folder: Path
) -> Iterator[Running]:
    log = folder / f"server-{port}.log"
    command = [sys.executable, "-m", "service.cli", "serve", *arguments, "--port", str(port)]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=folder, stdout=stream, stderr=stream, env=os.environ | env
        )
    scheme = "https" if "--tls-cert" in arguments else "http"
    server = Running(f"{scheme}://localhost:{port}", port, process, log)
    try:
        wait_until(lambda: ready(server))
        yield server
    finally:
        process.kill()
        process.wait()


def ready(server: Running) -> bool:
    """Asked as anybody may who trusts whatever certificate there is."""
    assert server.process.poll() is None, server.log.read_text()
    asked = ["curl", "-skf", "-o", os.devnull, f"{server.url}/readyz"]
    return subprocess.run(asked).returncode == 0
