"""The head cache can be turned off, and is off under a uvicorn that it was not tested with."""

import logging
import tomllib
from pathlib import Path

import pytest
import uvicorn
from helpers.fake_engine import FakeEngine
from helpers.paths import ROOT
from helpers.raw_http import Connection, request
from helpers.server import in_thread, wait_until
from helpers.tiny_bundle import WIDTH, write_tiny
from packaging.requirements import Requirement

from service.http.app import Application, create_app
from service.http.inference.connection.fast_answers import NEWEST, OLDEST, FastConnection
from service.http.inference.connection.limits import LimitedConnection
from service.settings import Limits, Settings


def make_app(folder: Path, **settings: object) -> Application:
    write_tiny(folder / "tiny" / "1", labels=False)
    made = Settings(models=folder, **settings)
    return create_app(made, engine_factory=lambda *_: FakeEngine(hidden_size=WIDTH))


def test_without_the_cache_answers_and_limits_are_the_same(tmp_path: Path) -> None:
    app = make_app(tmp_path, head_cache=False, limits=Limits(max_connections=2, max_headers=20))
    assert issubclass(app.connection, LimitedConnection)
    assert not issubclass(app.connection, FastConnection)
    with in_thread(app) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200)
        port = client.base_url.port or 0
        with Connection(port) as connection:
            for value in (1, 2, 3):
                connection.send(request(value))
                assert connection.classes() == [[value]]
            with Connection(port) as one_too_many:
                assert one_too_many.answer()[0] == 503
            connection.send(request(1, more="X: y\r\n" * 30))
            assert connection.answer()[0] == 431


@pytest.mark.parametrize("version", ["0.49.0", f"0.{NEWEST[1] + 1}.0", "1.0.0"])
def test_an_untested_uvicorn_turns_it_off_with_a_warning(
    tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uvicorn, "__version__", version)
    with caplog.at_level(logging.WARNING):
        app = make_app(tmp_path)
    assert not issubclass(app.connection, FastConnection)
    assert f"and this is {version}" in caplog.text


def test_the_tested_uvicorn_has_it_on(tmp_path: Path) -> None:
    assert issubclass(make_app(tmp_path).connection, FastConnection)


def test_what_may_be_installed_is_what_was_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = (
        found for found in map(Requirement, project["dependencies"]) if found.name == "uvicorn"
    )
    for minor in range(OLDEST[1] - 3, NEWEST[1] + 4):
        assert needed.specifier.contains(f"0.{minor}.0") == (OLDEST[1] <= minor <= NEWEST[1])
    assert not needed.specifier.contains("1.0.0")
