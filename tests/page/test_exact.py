"""The page's dial and its switches for exact and rescored answers, in a real browser."""

import re
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from helpers.browser import answers, ask, choose_file, needs_chromium, npy, opened, ready
from helpers.fidelity_layer import write_fidelity
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
    write_fidelity(folder / "models" / "faithful" / "1", width=WIDTH)
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


def test_rescored_answers_are_ranked_by_the_output_layer(page: Page, with_head: Running) -> None:
    page.get_by_label("Answers (k)").select_option("5")
    exact = page.get_by_role("checkbox", name=re.compile("Exact"))
    exact.check()
    rescore = page.get_by_role("checkbox", name=re.compile("Rescore"))
    rescore.check()
    expect(exact).not_to_be_checked()  # one of them only
    dial = page.get_by_label(re.compile("Experts searched"))
    expect(dial).to_be_enabled()
    dial.fill("3")
    with page.expect_request(lambda request: "/topk" in request.url) as sent:
        ask(page)
    assert sent.value.post_data_json.keys() >= {"rescore", "experts"}
    expect(page.locator("#answer-said")).to_contain_text("The output layer ranked what its experts")
    (sample,) = httpx.get(f"{with_head.url}/models/tiny/versions/1/samples?limit=1").json()[
        "samples"
    ]
    for place, number in enumerate(np.argsort(-(HEAD @ np.array(sample)))[:5]):
        expect(answers(page).nth(place)).to_contain_text(f"class {number}")
    exact.check()
    expect(rescore).not_to_be_checked()


def test_the_dial_says_what_more_experts_do(page: Page) -> None:
    hint, rescore = page.locator("#dial-hint"), page.locator("#rescore-field")
    expect(hint).to_have_text(re.compile("may rank worse; Rescore has the output layer rank"))
    expect(rescore).to_be_visible()
    page.get_by_role("checkbox", name=re.compile("Rescore")).check()
    page.get_by_label("Model", exact=True).select_option("without")
    expect(hint).to_have_text(re.compile("and may rank worse.$"))
    expect(rescore).to_be_hidden()
    ask(page)  # without it: the server would refuse
    expect(page.locator("#answer-said")).to_contain_text("The gate chose expert")
    page.get_by_label("Model", exact=True).select_option("faithful")
    expect(hint).to_have_text(re.compile("never lose an answer"))
    expect(rescore).to_be_hidden()
