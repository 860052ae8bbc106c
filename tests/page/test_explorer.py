"""The page at / in a real browser: what it shows of a model."""

import re
import shutil
from collections.abc import Iterator

import httpx
import pytest
from helpers.browser import answers, ask, choose, needs_chromium, opened, ready
from helpers.markup_bundle import NAMES, write_many
from helpers.paths import ROOT
from helpers.server import Running, running
from playwright.sync_api import Browser, Page, expect

DEMO = ROOT / "models" / "demo"
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("large")
    write_many(folder / "models" / "many" / "1", experts=1000)
    shutil.copytree(DEMO, folder / "models" / "demo")
    with running(folder / "models", folder / "log", "--default-model", "demo") as server:
        yield server


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
