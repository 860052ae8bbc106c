"""The files of the page at /: what they hold, how they are served, how its colours differ."""

import re
from pathlib import Path

import httpx
import pytest

from service.http.routes.page import FOLDER, MEDIA_TYPES

COLOURS = (FOLDER / "colours.css").read_text()
SCRIPTS = sorted(FOLDER.glob("*.js"))
TEXT, SHAPE = 4.5, 3.0  # WCAG 2.2 AA: of letters, and of what must be seen besides

PAIRS = [
    *((ink, ground, TEXT) for ink in ("ink", "muted", "accent") for ground in ("panel", "sunken")),
    ("ink", "ground", TEXT),
    ("muted", "ground", TEXT),
    ("on-accent", "accent", TEXT),
    ("mark", "panel", TEXT),
    ("problem", "problem-ground", TEXT),
    ("ink", "problem-ground", TEXT),
    ("notice", "notice-ground", TEXT),
    ("edge", "panel", SHAPE),
    ("edge", "sunken", SHAPE),
    ("bar", "panel", SHAPE),
    ("mark", "sunken", SHAPE),
    ("accent", "ground", SHAPE),
]


def palette(theme: int) -> dict[str, str]:
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", COLOURS)
    return {name: colours[theme] for name, *colours in found}


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast_by_hand() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(("one", "other", "least"), PAIRS)
def test_colours_that_meet_differ_enough(theme: int, one: str, other: str, least: float) -> None:
    colours = palette(theme)
    assert contrast(colours[one], colours[other]) >= least


def test_every_colour_is_in_the_palette() -> None:
    used = set()
    for name in ("page.css", "question.css", "explore.css"):
        style = (FOLDER / name).read_text()
        assert not re.search(r":[^;{]*(#[0-9a-fA-F]{3,8}\b|rgb\(|hsl\()", style)
        used |= set(re.findall(r"var\(--([\w-]+)\)", style))
    assert used - {"high", "low"} == set(palette(0))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_no_script_makes_markup_or_code_of_text(script: Path) -> None:
    text = script.read_text()
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "://"):
        allowed = text.count('"http://www.w3.org/2000/svg"') if forbidden == "://" else 0
        assert text.count(forbidden) == allowed, forbidden


def test_the_page_and_all_that_it_names_are_served(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"<script(?! (type=\"module\" )?src)|<style|\son\w+=|\sstyle=", page.text)
    named = set(re.findall(r'(?:src|href)="(page/[^"]+)"', page.text))
    for script in SCRIPTS:
        named |= {f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', script.read_text())}
    for address in named:
        answer = http.get(f"/{address}")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == MEDIA_TYPES[Path(address).suffix]
        assert answer.content == (FOLDER / Path(address).name).read_bytes()
    there = {f"page/{path.name}" for path in FOLDER.iterdir() if path.name != "index.html"}
    assert named == there, "a file that nobody asks for"


@pytest.mark.parametrize("name", ["nothing.js", "index.html", "..%2fapi.py", "%2e%2e/api.py"])
def test_nothing_else_is_served(http: httpx.Client, name: str) -> None:
    assert http.get(f"/page/{name}").status_code == 404
