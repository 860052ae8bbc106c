"""The page's switch for exact answers, in a real browser."""

import re
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from helpers.browser import answers, ask, choose_file, needs_chromium, npy, opened, ready
from helpers.server import Running, running
from helpers.tiny_bundle import N_CLASSES, WIDTH, rows_for, write_tiny
from playwright.sync_api import Browser, Page, expect

pytestmark = needs_chromium

HEAD = np.random.default_rng(0).normal(size=(N_CLASSES, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("exact")
    write_tiny(folder / "models" / "tiny" / "1", head=HEAD)
    write_tiny(folder / "models" / "without" / "1")
    with running(folder / "models", folder / "log", "--default-model", "tiny") as server:
        yield server


@pytest.fixture
def page(browser: Browser, with_head: Running) -> Iterator[Page]:
    with opened(browser, with_head.url) as page:
        yield ready(page)


def test_exact_answers_are_asked_for_and_said(page: Page, with_head: Running) -> None:
    page.get_by_label("Answers (k)").select_option("3")
    ask(page)
    said = page.locator("#answer-said")
    expect(said).not_to_contain_text("scanned")
    dial = page.get_by_label(re.compile("Experts searched"))
    dial.fill("2")
    page.get_by_role("checkbox", name=re.compile("Exact")).check()  # asked by itself
    expect(said).to_contain_text("All classes were scanned: these are the output layer's own.")
    expect(dial).to_be_disabled()
    (sample,) = httpx.get(f"{with_head.url}/models/tiny/versions/1/samples?limit=1").json()[
        "samples"
    ]
    best = np.argsort(-(HEAD @ np.array(sample)))[:3]
    for place, number in enumerate(best):
        expect(answers(page).nth(place)).to_contain_text(f"class {number}")
    page.get_by_role("checkbox", name=re.compile("Exact")).uncheck()
    expect(said).not_to_contain_text("scanned")
    expect(dial).to_be_enabled()


def test_of_a_file_too(page: Page) -> None:
    page.get_by_label("File", exact=True).check()
    page.get_by_role("checkbox", name=re.compile("Exact")).check()
    choose_file(page, "row.npy", npy(rows_for(0)))
    with page.expect_request(lambda request: "exact=true" in request.url) as sent:
        ask(page)
    assert "experts" not in sent.value.url
    expect(page.locator("#answer-said")).to_contain_text("All classes were scanned")


def test_a_model_without_its_output_layer_has_no_switch(page: Page) -> None:
    page.get_by_role("checkbox", name=re.compile("Exact")).check()
    page.get_by_label("Model", exact=True).select_option("without")
    expect(page.locator("#exact-field")).to_be_hidden()
    ask(page)
    expect(page.locator("#answer-said")).to_contain_text("The gate chose expert")
