"""A real browser for tests of the page at /: Debian's Chromium, driven by Playwright.

Whatever a test does, no script may fail and no request may leave the host that serves the page.
"""

import io
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from numpy.typing import NDArray
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    FilePayload,
    Locator,
    Page,
    expect,
    sync_playwright,
)

CHROMIUM = shutil.which("chromium")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed (Debian: chromium)"
)
SECONDS = 20.0
expect.set_options(timeout=1000 * SECONDS)


@contextmanager
def launched() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, address: str, **context: Any) -> Iterator[Page]:
    """A page in a fresh profile, once it shows something; what it must never do is asserted."""
    options = {"viewport": {"width": 1440, "height": 1000}, **context}
    profile = browser.new_context(**options)
    profile.set_default_timeout(1000 * SECONDS)
    page = profile.new_page()
    failures: list[str] = []
    hosts: set[str] = set()

    def heard(message: ConsoleMessage) -> None:
        # The browser itself notes each answer that is not good; tests provoke some.
        if message.type in ("error", "warning") and "Failed to load" not in message.text:
            failures.append(message.text)

    page.on("console", heard)
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    try:
        page.goto(address)
        yield page
        assert not failures
        assert hosts == {urlsplit(address).netloc}
    finally:
        profile.close()


def ready(page: Page) -> Page:
    """Once all of a model is shown."""
    expect(page.locator("#main[aria-busy=false]")).to_be_visible()
    return page


def choose(page: Page, model: str) -> None:
    page.get_by_label("Model", exact=True).select_option(model)
    expect(page).to_have_title(re.compile(f"^{model} "))
    ready(page)


def ask(page: Page) -> None:
    page.get_by_role("button", name="Ask", exact=True).click()


def answers(page: Page) -> Locator:
    return page.get_by_role("list", name="Most probable classes").get_by_role("listitem")


def tab_to(page: Page, wanted: Locator, most: int = 40) -> None:
    """By Tab alone, as one who has no mouse."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if wanted.evaluate("element => element === document.activeElement"):
            return
    raise AssertionError(f"{wanted} is not reached by Tab.")


def choose_file(page: Page, name: str, content: bytes) -> None:
    file: FilePayload = {"name": name, "mimeType": "application/x-npy", "buffer": content}
    page.get_by_label("Choose a .npy file").set_input_files(file)


def npy(rows: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, rows)
    return buffer.getvalue()
