"""A server with small models, and the page at / of it."""

from collections.abc import Iterator

import pytest
from helpers.browser import opened, ready
from helpers.markup_bundle import write_words
from helpers.server import Running, running
from helpers.tiny_bundle import write_tiny
from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("site")
    models = folder / "models"
    write_words(models / "words" / "1")
    write_tiny(models / "tiny" / "1", seed=1)
    write_tiny(models / "tiny" / "2", seed=2)
    (models / "tiny" / "labels.json").write_text('{"stable": 1}')
    write_words(models / "nameless" / "1", labels=False, samples=False)
    with running(models, folder / "log", "--default-model", "words") as server:
        yield server


@pytest.fixture
def page(browser: Browser, site: Running) -> Iterator[Page]:
    with opened(browser, site.url) as page:
        yield ready(page)
