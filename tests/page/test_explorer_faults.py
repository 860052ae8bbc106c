"""The page at / when something is wrong: kind words, a missing key, a server that is gone."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.browser import answers, ask, choose_file, needs_chromium, npy, opened, ready
from helpers.markup_bundle import BETWEEN, write_words
from helpers.server import Running, free_port, running
from playwright.sync_api import Browser, Page, Route, expect

KEY, ADMIN = "dss_" + 20 * "k", "dss_" + 20 * "a"
KEYS = (
    f'[{{"name": "page", "key": "{KEY}", "scopes": ["query"]}},'
    f' {{"name": "ops", "key": "{ADMIN}", "scopes": ["admin"]}}]'
)

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("words") / "models"
    write_words(models / "words" / "1")
    return models


@pytest.fixture(scope="module")
def site(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("site") / "log"
    with running(words, log, env={"DSS_LIMITS__MAX_K": "5"}) as server:
        yield server


@pytest.fixture
def page(browser: Browser, site: Running) -> Iterator[Page]:
    with opened(browser, site.url) as page:
        ready(page).get_by_label("Answers (k)").select_option("3")
        yield page


def paste(page: Page, text: str) -> None:
    page.get_by_label("Vector", exact=True).check()
    page.get_by_label("Hidden vector").fill(text)
    ask(page)


WRONG_VECTORS = {
    "": "paste one first",
    "1 2 three 4": "Number 3 of the vector is not a finite number.",
    "[1, 2": "is not a JSON array",
    '[1, "2", 3, 4]': "Number 2 of the vector",
    "[[1,2,3,4],[1,2,3,4]]": "There are 2 rows: paste one of them.",
    "1 2 3": "Inputs have shape [1, 3]; [rows, 4] is expected.",
    "1e39 0 0 0": "is too large for float32",
}


def test_a_wrong_vector_is_said_kindly(page: Page) -> None:
    problem = page.get_by_role("alert")
    for text, sentence in WRONG_VECTORS.items():
        paste(page, text)
        expect(problem).to_contain_text(sentence)
        expect(answers(page)).to_have_count(0)
        paste(page, "1 0 0 0")
        expect(problem).to_be_hidden()
        expect(answers(page)).to_have_count(3)


def test_what_to_do_is_said_with_it(page: Page) -> None:
    paste(page, "1 2 3")
    expect(page.get_by_role("alert")).to_contain_text("This model takes 4 numbers a row.")
    paste(page, "1 0 0 0")
    expect(answers(page)).to_have_count(3)
    page.get_by_label("Answers (k)").select_option("10")
    expect(page.get_by_role("alert")).to_contain_text("this server answers at most 5")
    expect(page.get_by_role("alert")).to_contain_text("Choose fewer answers.")


WRONG_FILES = {
    b"not an array": "The body is not a .npy file.",
    npy(np.array([BETWEEN], np.float32))[:-3]: "The .npy header announces 16 bytes of data",
    npy(np.array([[1, 2, 3, 4]])): "must be float32, float16 or float64",
    npy(np.asfortranarray(np.ones((2, 4), np.float32))): "is in Fortran order",
    npy(np.ones((1, 2, 4), np.float32)): "has 3 dimensions",
    npy(np.ones((1, 5), np.float32)): "Inputs have shape [1, 5]",
    b"": "The body is not a .npy file.",
}


def test_a_wrong_file_is_said_kindly(page: Page) -> None:
    page.get_by_label("File", exact=True).check()
    for content, sentence in WRONG_FILES.items():
        choose_file(page, "wrong.npy", content)
        ask(page)
        expect(page.get_by_role("alert")).to_contain_text(sentence)


def test_a_row_that_the_file_does_not_have(page: Page) -> None:
    page.get_by_label("File", exact=True).check()
    content = npy(np.ones((3, 4), np.float32))
    choose_file(page, "rows.npy", content)
    page.get_by_label("Row of the file, from 0").fill("7")
    ask(page)
    expect(page.get_by_role("alert")).to_have_text("The file has the rows 0 to 2.")


def test_an_expert_that_is_not_there(page: Page) -> None:
    page.get_by_label("Expert", exact=True).fill("99")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text("There is no expert '99'; this model has 0 to 2.")).to_be_visible()


def test_a_busy_server_is_said_kindly(page: Page) -> None:
    problem = {
        "type": "urn:dss:problem:queue-full", "title": "Queue full", "status": 429,
        "detail": "The queue is full.", "instance": "/topk",
    }  # fmt: skip

    def busy(route: Route) -> None:
        route.fulfill(status=429, json=problem, content_type="application/problem+json")

    page.route(re.compile("/topk"), busy)
    ask(page)
    expect(page.get_by_role("alert")).to_contain_text("The server is busy")


def test_a_server_that_goes_and_comes_back(words: Path, tmp_path: Path, browser: Browser) -> None:
    port = free_port()
    with (
        running(words, tmp_path / "first", port=port) as first,
        opened(browser, first.url) as page,
    ):
        ready(page)
        ask(page)
        expect(answers(page).first).to_be_visible()
        first.process.kill()
        first.process.wait()
        ask(page)
        banner = page.locator("#banner")
        expect(banner).to_contain_text("The server does not answer.")
        with running(words, tmp_path / "second", port=port):
            expect(banner).to_be_hidden()
            ask(page)
            expect(answers(page).first).to_be_visible()
            expect(page.get_by_role("alert")).to_be_hidden()


def test_a_server_without_a_model(browser: Browser, site: Running) -> None:
    with opened(browser, f"{site.url}/livez") as page:
        listed = re.compile("/models$")
        page.route(listed, lambda route: route.fulfill(json={"models": []}))
        page.goto(site.url)
        expect(page.locator("#banner")).to_contain_text("No model is loaded")
        page.unroute(listed)
        ready(page)
        expect(page.locator("#banner")).to_be_hidden()


def test_behind_a_prefix(browser: Browser, site: Running) -> None:
    with opened(browser, f"{site.url}/livez") as page:

        def pass_on(route: Route) -> None:
            answer = route.fetch(url=route.request.url.replace("/inner/dss/", "/"))
            route.fulfill(response=answer)

        page.route(re.compile("/inner/dss/"), pass_on)
        page.goto(f"{site.url}/inner/dss/")
        ready(page).get_by_label("Answers (k)").select_option("3")
        ask(page)
        expect(answers(page)).to_have_count(3)


# --- keys -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def closed(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("closed") / "log"
    env = {"DSS_ACCESS__KEYS": KEYS, "DSS_ACCESS__METRICS": "admin"}
    with running(words, log, env=env) as server:
        yield server


def test_a_key_is_asked_for_kept_in_the_tab_and_forgotten(
    browser: Browser, closed: Running
) -> None:
    with opened(browser, closed.url) as page:
        field = page.get_by_label("API key", exact=True)
        expect(field).to_be_focused()
        expect(page.locator("#key-problem")).to_be_hidden()
        expect(page.locator("#main")).to_be_hidden()
        field.fill("dss_not-a-key-at-all")
        page.keyboard.press("Enter")
        expect(page.locator("#key-problem")).to_have_text("The API key is not known.")
        field.fill("no spaces allowed")
        page.get_by_role("button", name="Use this key").click()
        expect(page.locator("#key-problem")).to_contain_text("no spaces")
        field.fill(KEY)
        with page.expect_request(re.compile("/models$")) as sent:
            page.keyboard.press("Enter")
        assert sent.value.headers["authorization"] == f"Bearer {KEY}"
        ready(page)
        expect(page.locator("#key")).to_be_hidden()
        ask(page)
        expect(answers(page).first).to_be_visible()
        # This key may not read /metrics here; that is said, and the rest goes on.
        expect(page.locator("#traffic-hint")).to_contain_text("does not have the scope admin")
        assert page.evaluate("JSON.stringify(sessionStorage)").count(KEY) == 1
        assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location")
        page.reload()
        ready(page)
        page.get_by_role("button", name="Forget key").click()
        expect(field).to_be_focused()
        assert page.evaluate("sessionStorage.length") == 0


def test_the_next_visitor_has_no_key(browser: Browser, closed: Running) -> None:
    with opened(browser, closed.url) as page:
        expect(page.get_by_label("API key", exact=True)).to_be_visible()
        assert page.get_by_label("API key", exact=True).input_value() == ""
