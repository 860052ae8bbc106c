"""The page at / in a real browser: what it asks, how it is used, and the traffic that it charts."""

import json
import re
from functools import partial

import httpx
import numpy as np
from helpers.browser import answers, ask, choose_file, needs_chromium, npy, opened, ready, tab_to
from helpers.markup_bundle import BETWEEN
from helpers.server import Running
from playwright.sync_api import Browser, Page, Request, expect

pytestmark = needs_chromium

# --- what it asks -----------------------------------------------------------------------------


def test_a_sample_is_asked_and_the_dial_changes_the_answer(page: Page) -> None:
    page.get_by_label("Answers (k)").select_option("3")
    ask(page)
    expect(answers(page)).to_have_count(3)
    said = page.locator("#answer-said")
    expect(said).to_have_text(
        re.compile(r"^The gate chose expert 0 with 0\.\d+\. Answered in [\d.]+ (µs|ms|s)\.$")
    )
    expect(answers(page).first).not_to_contain_text("far away")
    dial = page.get_by_label(re.compile("Experts searched"))
    assert dial.get_attribute("max") == "3"  # no more than there are
    dial.fill("2")
    expect(answers(page).first).to_contain_text("far away")
    expect(answers(page).first.get_by_text("new")).to_be_visible()
    expect(page.get_by_text("1 class that one expert alone")).to_be_visible()
    expect(
        page.get_by_role("button", name=re.compile("^Expert 0: .*chosen by the last"))
    ).to_be_visible()
    said.get_by_role("button", name="expert 0").click()
    expect(page.get_by_role("heading", name="Expert 0")).to_be_visible()
    answers(page).first.get_by_role("button").click()
    expect(page.locator("#found .name")).to_have_text("far away")
    page.get_by_label("Sample of the bundle").select_option("1")  # asked by itself
    expect(said).to_contain_text("The gate chose expert 2")


def test_a_vector_is_pasted(page: Page) -> None:
    page.get_by_label("Vector", exact=True).check()
    said = page.locator("#answer-said")
    for text in (json.dumps(BETWEEN), f"[{BETWEEN}]", "1, 0.9,0\n1e0"):
        page.get_by_label("Hidden vector").fill(text)
        page.keyboard.press("Control+Enter")
        expect(said).to_contain_text("The gate chose expert 0")
        expect(answers(page)).to_have_count(10)
        page.get_by_label("Hidden vector").fill("0 0 7 0")
        page.keyboard.press("Control+Enter")
        expect(said).to_contain_text("The gate chose expert 2")


def carries(content: bytes, request: Request) -> bool:
    return "/topk" in request.url and request.post_data_buffer == content


def test_a_file_of_one_row_is_sent_as_it_is(page: Page) -> None:
    page.get_by_label("File", exact=True).check()
    for dtype in (np.float32, np.float16, np.float64):
        content = npy(np.array([BETWEEN], dtype))
        with page.expect_request(partial(carries, content)) as sent:
            choose_file(page, "row.npy", content)
            facts = f"row.npy: {np.dtype(dtype)}, 1 row of 4 numbers."
            expect(page.get_by_text(facts)).to_be_visible()
            ask(page)
        assert sent.value.headers["content-type"] == "application/x-npy"
        expect(page.locator("#answer-said")).to_contain_text("The gate chose expert 0")


def drop(page: Page, name: str, content: bytes) -> None:
    carried = page.evaluate_handle(
        """([name, bytes]) => {
            const carried = new DataTransfer();
            carried.items.add(new File([new Uint8Array(bytes)], name));
            return carried;
        }""",
        [name, list(content)],
    )
    for kind in ("dragover", "drop"):
        page.dispatch_event("#ask", kind, {"dataTransfer": carried})


def test_a_file_is_dropped_and_its_row_picked(page: Page) -> None:
    drop(page, "rows.npy", npy(np.array([[9, 0, 0, 0], BETWEEN, [0, 0, 9, 0]], np.float32)))
    expect(page.get_by_text("rows.npy: float32, 3 rows of 4 numbers.")).to_be_visible()
    ask(page)
    expect(page.locator("#answer-said")).to_contain_text("The gate chose expert 0")
    with page.expect_request(partial(carries, npy(np.array([[0, 0, 9, 0]], np.float32)))):
        page.get_by_label("Row of the file, from 0").fill("2")
    expect(page.locator("#answer-said")).to_contain_text("The gate chose expert 2")
    drop(page, "flat.npy", npy(np.array([0, 9, 0, 0], np.float64)))
    expect(page.get_by_text("flat.npy: float64, 1 row of 4 numbers.")).to_be_visible()
    expect(page.locator("#answer-said")).to_contain_text("The gate chose expert 1")


# --- how it looks and is used -----------------------------------------------------------------


def test_dark_and_light_by_system_and_by_choice(browser: Browser, site: Running) -> None:
    def ground(page: Page) -> str:
        found: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return found

    dark, light = "rgb(13, 18, 21)", "rgb(242, 244, 245)"
    with opened(browser, site.url, color_scheme="dark") as page:
        ready(page)
        assert ground(page) == dark
        theme = page.get_by_role("button", name=re.compile("^Theme"))
        expect(theme).to_have_text("Theme: system")
        theme.click()
        theme.click()
        expect(theme).to_have_text("Theme: light")
        assert ground(page) == light
        page.reload()
        ready(page)
        assert ground(page) == light
        theme.click()
        expect(theme).to_have_text("Theme: system")
        assert ground(page) == dark


def test_everything_is_reached_by_keyboard_alone(page: Page) -> None:
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the question")).to_be_focused()
    page.keyboard.press("Enter")
    tab_to(page, page.get_by_label("Sample", exact=True), most=2)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    tab_to(page, page.get_by_label(re.compile("Experts searched")), most=3)
    page.keyboard.press("ArrowRight")
    tab_to(page, page.get_by_role("button", name="Ask", exact=True), most=3)
    page.keyboard.press("Enter")
    expect(answers(page).first).to_contain_text("far away")
    tab_to(page, page.locator("#answer-said button"), most=2)
    bars = page.get_by_role("toolbar", name="Experts")
    tab_to(page, bars.get_by_role("button").first)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    expect(page.get_by_role("heading", name="Expert 1")).to_be_visible()
    expect(bars.get_by_role("button").nth(1)).to_be_focused()
    tab_to(page, page.get_by_role("application", name="Experts by classes"), most=4)
    tab_to(page, page.get_by_label("Name or id"))
    page.keyboard.type("far")
    page.keyboard.press("Enter")
    expect(page.locator("#found .name")).to_have_text("far away")


def test_every_control_has_a_name(page: Page) -> None:
    ask(page)
    expect(answers(page).first).to_be_visible()
    nameless = page.evaluate(
        """[...document.querySelectorAll(
                "button, select, textarea, input, [role=img], [tabindex='0']")]
            .filter((one) => !(one.labels?.length || one.ariaLabel || one.textContent.trim()
                || document.getElementById(one.getAttribute("aria-labelledby"))))
            .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    said = page.locator("main").aria_snapshot()
    for line in (
        '- slider "Experts searched": "1"',
        '- searchbox "Name or id"',
        '- toolbar "Experts"',
    ):
        assert line in said
    levels = page.locator("h1, h2, h3").evaluate_all("all => all.map((one) => one.tagName)")
    assert levels == ["H1", *["H2"] * (len(levels) - 1)]


# --- live -------------------------------------------------------------------------------------


def test_traffic_is_charted_while_the_page_is_seen_and_left_alone_otherwise(
    browser: Browser, site: Running
) -> None:
    looks: list[str] = []
    metrics = re.compile("/metrics$")
    with opened(browser, f"{site.url}/livez") as page:
        page.clock.install()
        page.on(
            "response",
            lambda answer: looks.append(answer.url) if metrics.search(answer.url) else None,
        )
        with page.expect_response(metrics):
            page.goto(site.url)
        for _ in range(20):
            assert httpx.post(f"{site.url}/topk", json={"inputs": [BETWEEN]}).is_success
        with page.expect_response(metrics):
            page.clock.run_for(2100)
        expect(page.locator("#p99")).to_have_text(re.compile(r"^[\d.]+ (µs|ms|s)$"))
        name = re.compile(r"^Requests per second: now [\d.]*[1-9]")
        expect(page.get_by_role("img", name=name)).to_be_visible()
        page.evaluate(
            """Object.defineProperty(document, "hidden", { configurable: true, get: () => true });
            document.dispatchEvent(new Event("visibilitychange"));"""
        )
        seen = len(looks)
        page.clock.run_for(60_000)
        page.evaluate("fetch('livez').then((answer) => answer.text())")
        assert len(looks) == seen
        with page.expect_response(metrics):
            page.evaluate(
                "delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))"
            )


def test_quantiles_are_worked_out_as_prometheus_does(page: Page) -> None:
    found = page.evaluate(
        """async () => {
            const { between, histogram, quantile } = await import("./page/metrics.js");
            const text = (counts) => ["1.0", "2.0", "4.0", "+Inf"].map((le, at) =>
                `dss_http_request_seconds_bucket{le="${le}",route="/topk"} ${counts[at]}\n`
                + `dss_http_request_seconds_bucket{le="${le}",route="/models"} 7.0\n`).join("");
            const [none, some] = [histogram(text([5, 5, 5, 5])), histogram(text([15, 35, 40, 45]))];
            const came = between(none, some);
            return [came.counts, quantile(came, 0.5), quantile(came, 0.25), quantile(came, 0.99),
                quantile(between(some, some), 0.5), between(some, none)];
        }"""
    )
    # 10 took up to 1 s, 20 up to 2 s, 5 up to 4 s, and 5 longer than any bucket.
    assert found == [[10, 30, 35, 40], 1.5, 1, 4, None, None]
