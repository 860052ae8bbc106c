"""A tiny bundle, a models folder, and a live server that serves it."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import hypothesis
import pytest
from helpers.server import Running, running
from helpers.tiny_bundle import write_tiny

from service import bundle
from service.engine import Engine

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Tests run side by side, one thread each; set before torch is imported by any test.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Whoever runs the tests may like colours or not; what commands print must not depend on it.
for name in ("FORCE_COLOR", "NO_COLOR"):
    os.environ.pop(name, None)

# Each httpx.get() would read all the authorities of the world again, which takes 40 ms; tests ask
# this host, mostly without TLS.
transports = httpx._transports.default
transports.create_ssl_context = functools.cache(transports.create_ssl_context)

# The machine may be busy; how long an example takes says nothing about it.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bundle.Bundle:
    return write_tiny(tmp_path_factory.mktemp("bundle") / "tiny" / "1")


@pytest.fixture(scope="session", params=["compiled", "onnx"])
def tiny_engine(tiny: bundle.Bundle, request: pytest.FixtureRequest) -> Engine:
    return Engine(tiny, backend=request.param)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` in two good versions and a refused one; `plain` without labels."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "tiny" / "1", seed=1)
    write_tiny(folder / "tiny" / "2", seed=2)
    write_tiny(folder / "tiny" / "3", seed=3)
    (folder / "tiny" / "3" / "labels.txt").write_text("altered\n")
    write_tiny(folder / "plain" / "1", seed=4, labels=False)
    return folder


@pytest.fixture(scope="session")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that tests share; only tests that count or kill start their own."""
    log = tmp_path_factory.mktemp("server") / "log"
    with running(models, log, "--default-model", "tiny") as started:
        yield started


@pytest.fixture(scope="session")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """One for each file: while it runs there is an event loop, which is in other tests' way."""
    from helpers.browser import launched  # most files need none

    with launched() as started:
        yield started
