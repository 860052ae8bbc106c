"""Makes docs/images/explorer.png: the page at / of a real service under some traffic.

make explorer-picture             needs Chromium (Debian: chromium)
python -m deploy.pictures.explorer --theme dark --seconds 60
"""

import argparse
import re
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, expect, sync_playwright

from deploy.pictures.traffic import Phase, Rows, driven, requests
from service.bench.server import serving

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"
PICTURE = ROOT / "docs" / "images" / "explorer.png"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
SERVICE_SETTINGS = {"DSS_SHADOW__RATE": "0.1"}
SIZE = {"width": 1440, "height": 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="of traffic")
    parser.add_argument("--theme", choices=["light", "dark"], default="light")
    parser.add_argument("--out", type=Path, default=PICTURE)
    given = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("Chromium is not installed (Debian: chromium).")
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(DEMO.parent, Path(folder) / "service.log", env=SERVICE_SETTINGS) as server,
    ):
        traffic = threading.Thread(target=driven, args=(server.port, given.seconds, phases()))
        traffic.start()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
            context = browser.new_context(viewport=SIZE, color_scheme=given.theme)  # type: ignore[arg-type]
            page = context.new_page()
            page.wait_for_timeout(3000)  # the first requests are slow, and there are 24 at once
            page.goto(server.url)
            # The chart fills; traffic still runs.
            page.wait_for_timeout(1000 * given.seconds - 8000)
            use(page)
            picture = page.screenshot()
            browser.close()
        traffic.join()
    given.out.write_bytes(picture)
    print(f"{given.out}: {len(picture):,} bytes")  # noqa: T201


def phases() -> list[Phase]:
    """Some experts get more than others, and the load comes in waves."""
    rows = Rows(DEMO / "1")
    chance = np.random.default_rng(1)
    experts = np.repeat(np.arange(rows.n_experts), chance.integers(1, 12, rows.n_experts))
    asked = requests(rows, experts, sizes=(1, 2, 4, 8))
    loads = (120, 180, 90, 220, 150, 200)
    return [Phase("", 1 / len(loads), asked, per_second=load) for load in loads]


def use(page: Page) -> None:
    """As a visitor would: a question, a wider search, the chosen expert, and a class."""
    page.get_by_label("Sample of the bundle").select_option("1")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.get_by_label(re.compile("Experts searched")).fill("3")
    expect(page.locator("#answer-new")).to_be_visible()
    page.locator("#answer-said button").click()
    page.get_by_label("Name or id").fill("super 14 / sub 2")
    expect(page.locator("#found li").first).to_be_visible()
    page.get_by_role("button", name="Ask", exact=True).click()  # once more, as a visitor who stays
    expect(page.locator("#answer.old")).to_have_count(0)
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")


if __name__ == "__main__":
    main()
