"""The page at / in a real browser: what it shows, what it asks, and how it is used by keyboard."""

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial

import httpx
import numpy as np
import pytest
from helpers.browser import answers, choose_file, needs_chromium, npy, opened, ready, tab_to
from helpers.markup_bundle import BETWEEN, NAMES, write_many, write_words
from helpers.paths import ROOT
from helpers.server import Running, running
from helpers.tiny_bundle import write_tiny
from playwright.sync_api import Browser, Page, Request, expect

DEMO = ROOT / "models" / "demo"
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}

pytestmark = needs_chromium


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


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("large")
    write_many(folder / "models" / "many" / "1", experts=1000)
    shutil.copytree(DEMO, folder / "models" / "demo")
    with running(folder / "models", folder / "log", "--default-model", "demo") as server:
        yield server


@pytest.fixture
def page(browser: Browser, site: Running) -> Iterator[Page]:
    with opened(browser, site.url) as page:
        yield ready(page)


def choose(page: Page, model: str) -> None:
    page.get_by_label("Model", exact=True).select_option(model)
    expect(page).to_have_title(re.compile(f"^{model} "))
    ready(page)


def ask(page: Page) -> None:
    page.get_by_role("button", name="Ask", exact=True).click()


# --- what it shows ----------------------------------------------------------------------------


def test_the_model_is_shown(page: Page) -> None:
    facts = page.locator("#facts")
    for name, value in (
        ("Classes", "10"),
        ("Hidden size", "4"),
        ("Experts", "3"),
        ("Accuracy", "87.50%"),
        ("Speedup trained", "1.5\N{MULTIPLICATION SIGN}"),
    ):
        row = facts.locator("div").filter(has=page.get_by_text(name, exact=True))
        expect(row.locator("dd")).to_have_text(value)
    expect(page.get_by_label("Model", exact=True)).to_have_value("words")
    expect(page.get_by_text("Nothing asked yet.")).to_be_visible()


def test_versions_are_chosen_and_shown_with_their_labels(page: Page) -> None:
    choose(page, "tiny")
    versions = page.get_by_label("Version", exact=True)
    assert versions.locator("option").all_text_contents() == ["2 (default)", "1 (stable)"]
    with page.expect_request(re.compile("/models/tiny/versions/1/matrix")):
        versions.select_option("1")
    ready(page)
    with page.expect_request(re.compile("/models/tiny/versions/1/topk")):
        ask(page)
    expect(answers(page)).to_have_count(10)


def test_an_expert_is_a_bar_and_a_click_shows_its_labels(page: Page) -> None:
    bars = page.get_by_role("toolbar", name="Experts").get_by_role("button")
    expect(bars).to_have_count(3)
    page.get_by_role("button", name=re.compile("^Expert 1: 4 classes, ")).click()
    expect(page.get_by_role("heading", name="Expert 1")).to_be_visible()
    held = page.get_by_role("list", name="Expert 1").get_by_role("listitem")
    expect(held).to_have_text(["5<b>bold</b>", "6word 6", "7far away", "8word 8"])
    expect(bars.nth(1)).to_have_attribute("aria-pressed", "true")


def test_bars_are_sorted_by_number_classes_and_traffic(page: Page, site: Running) -> None:
    def order() -> list[str | None]:
        found = page.get_by_role("toolbar").get_by_role("button").all()
        return [bar.get_attribute("data-expert") for bar in found]

    assert order() == ["0", "1", "2"]
    row = [[0.0, 0.0, 5.0, 0.0]]
    assert httpx.post(f"{site.url}/models/tiny/topk", json={"inputs": row * 50, "k": 1}).is_success
    choose(page, "tiny")
    expect(
        page.get_by_role("button", name=re.compile(r"^Expert 2: .*[1-9]\d*\.\d+% of rows"))
    ).to_be_visible()
    page.get_by_label("Sort by").select_option("traffic")
    assert order()[0] == "2"
    page.get_by_label("Sort by").select_option("classes")
    assert order() == ["0", "1", "2"]  # 5, 4 and 4 classes


def test_a_class_is_found_with_its_experts(page: Page) -> None:
    search = page.get_by_label("Name or id")
    search.fill("WORD")
    found = page.get_by_role("list", name="Find a class").get_by_role("listitem")
    expect(found).to_have_count(5)
    expect(page.get_by_text("5 classes found.")).to_be_visible()
    search.fill("0")
    expect(found).to_have_count(1)
    expect(found).to_contain_text("in 2 experts")
    found.get_by_role("button", name="Expert 2").click()
    expect(page.get_by_role("heading", name="Expert 2")).to_be_visible()
    search.fill("nothing like it")
    expect(page.get_by_text("No class found.")).to_be_visible()


def test_names_that_look_like_markup_are_text(page: Page) -> None:
    page.get_by_label("Name or id").fill("<img")
    expect(page.locator("#found .name")).to_have_text(NAMES[0])
    page.get_by_label("Answers (k)").select_option("5")
    ask(page)
    expect(page.locator("#answer-bars .name").first).to_have_text(NAMES[0])
    expect(page.locator("#answer-bars .name").nth(2)).to_have_text("(no name)")
    assert page.locator("img[src=x], main b").count() == 0
    assert page.title() != "1"


def test_a_matrix_cell_is_told_by_pointer_and_by_keys(page: Page) -> None:
    field = page.get_by_role("application", name="Experts by classes")
    page.get_by_label("Rows by").select_option("number")
    expect(page.locator("#cell")).to_contain_text("11 classes between them")
    box = field.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 0.5 * box["height"])
    expect(page.locator("#cell")).to_have_text("Expert 1, class 7: 1 of 1 held.")
    field.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#cell")).to_have_text("Expert 2, class 7: 0 of 1 held.")
    page.keyboard.press("Home")
    expect(page.locator("#cell")).to_have_text("Expert 2, class 0: 1 of 1 held.")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Expert 2")).to_be_visible()
    page.get_by_text("The same as a table").click()
    rows = page.get_by_role("region", name="Which classes each expert holds").get_by_role("row")
    expect(rows).to_have_text(
        ["ExpertClasses heldFromTo", "05class 0class 4", "14class 5class 8", "22class 0class 9"]
    )


def test_a_model_without_names_and_samples(page: Page) -> None:
    choose(page, "nameless")
    expect(page.get_by_text("carries no samples")).to_be_visible()
    ask(page)
    expect(page.get_by_role("alert").filter(has_text="carries no samples")).to_be_visible()
    page.get_by_label("Vector", exact=True).check()
    page.get_by_label("Hidden vector").fill("0 0 3 0")
    ask(page)
    expect(answers(page).first).to_contain_text("Class ")
    page.get_by_role("button", name=re.compile("^Expert 2: ")).click()
    held = page.get_by_role("list", name="Expert 2").get_by_role("listitem")
    expect(held).to_have_text(["0Class 0", "9Class 9"])
    page.get_by_label("Id: this model's classes have no names").fill("9")
    expect(page.get_by_text("1 class found.")).to_be_visible()


def test_the_demo_and_a_thousand_experts_fit_a_phone(browser: Browser, large: Running) -> None:
    with opened(browser, large.url, **PHONE) as page:
        for model, number in (("demo", 100), ("many", 1000)):
            choose(page, model)
            bars = page.get_by_role("toolbar", name="Experts").get_by_role("button")
            expect(bars).to_have_count(number)
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            assert page.locator("#cells").evaluate("canvas => canvas.height") == min(number, 200)
        page.get_by_role("button", name=re.compile("^Expert 999: ")).click()
        expect(page.get_by_role("heading", name="Expert 999")).to_be_visible()
        page.get_by_role("button", name="Expert 0: 0 classes", exact=False).first.click()
        expect(page.get_by_text("It holds no class.")).to_be_visible()


def test_an_experts_classes_come_in_pages(browser: Browser, large: Running) -> None:
    with opened(browser, large.url) as page:
        ready(page).get_by_label("Expert", exact=True).fill("37")
        page.keyboard.press("Enter")
        held = page.get_by_role("list", name="Expert 37").get_by_role("listitem")
        expect(held).to_have_count(50)
        expect(page.get_by_text("1 to 50 of 100")).to_be_visible()
        expect(page.get_by_role("button", name="Previous")).to_be_disabled()
        page.get_by_role("button", name="Next").click()
        expect(page.get_by_text("51 to 100 of 100")).to_be_visible()
        expect(page.get_by_role("button", name="Next")).to_be_disabled()


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
