"""What a browser is told: pages that trust this server alone, and which other origins may ask."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from helpers.server import running
from helpers.tiny_bundle import rows_for

PAGE = "https://page.example"
ROWS = {"inputs": rows_for(0).tolist(), "k": 1}
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization",
}
KEY = "dss_" + 20 * "k"
KEYS = f'[{{"name": "page", "key": "{KEY}", "scopes": ["query"]}}]'
BEARER = {"Authorization": f"Bearer {KEY}"}


def test_the_page_of_the_api_needs_no_other_host(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.status_code == 200
    assert page.headers["Content-Type"].startswith("text/html")
    needed = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert len(needed) == 4
    for address in needed:
        assert "//" not in address
        assert http.get(f"/{address}").status_code == 200
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script(?! src)|<style|\son\w+=|\sstyle=", page.text)


@pytest.mark.parametrize("path", ["/docs", "/", "/models", "/livez", "/nothing", "/openapi.json"])
def test_answers_tell_a_browser_not_to_guess(http: httpx.Client, path: str) -> None:
    headers = http.get(path).headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_other_origins_may_not_ask_unless_a_setting_says_so(http: httpx.Client) -> None:
    for answer in (
        http.get("/models", headers={"Origin": PAGE}),
        http.post("/topk", json=ROWS, headers={"Origin": PAGE}),
        http.options("/topk", headers={"Origin": PAGE, **PREFLIGHT}),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.fixture(scope="module")
def crossing(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    env = {"DSS_CORS__ORIGINS": f'["{PAGE}"]', "DSS_ACCESS__KEYS": KEYS}
    log = tmp_path_factory.mktemp("crossing") / "log"
    with (
        running(models, log, "--default-model", "tiny", env=env) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def allowed(answer: httpx.Response) -> str | None:
    found: str | None = answer.headers.get("Access-Control-Allow-Origin")
    return found


@pytest.mark.parametrize("path", ["/topk", "/v2/models/tiny/infer", "/models"])
def test_a_preflight_is_answered_without_a_key(crossing: httpx.Client, path: str) -> None:
    """Browsers send none with it."""
    answer = crossing.options(path, headers={"Origin": PAGE, **PREFLIGHT})
    assert answer.status_code == 200
    assert allowed(answer) == PAGE
    assert "authorization" in answer.headers["Access-Control-Allow-Headers"].lower()
    assert "Access-Control-Allow-Credentials" not in answer.headers
    other = crossing.options(path, headers={"Origin": "https://other.example", **PREFLIGHT})
    assert other.status_code == 400
    assert allowed(other) is None


def test_every_answer_to_the_page_says_that_it_may_be_read(crossing: httpx.Client) -> None:
    def post(origin: str | None, **headers: str) -> httpx.Response:
        origins = {} if origin is None else {"Origin": origin}
        return crossing.post("/topk", json=ROWS, headers={**headers, **origins})

    for _ in range(3):  # without an origin, a head is known after the first time
        assert allowed(post(None, **BEARER)) is None
        answer = post(PAGE, **BEARER)
        assert (answer.status_code, allowed(answer)) == (200, PAGE)
        assert "DSS-Model" in answer.headers["Access-Control-Expose-Headers"]
        assert allowed(post("https://other.example", **BEARER)) is None
    refused = post(PAGE)
    assert (refused.status_code, allowed(refused)) == (401, PAGE)
    listed = crossing.get("/models", headers={"Origin": PAGE, **BEARER})
    assert (listed.status_code, allowed(listed)) == (200, PAGE)
