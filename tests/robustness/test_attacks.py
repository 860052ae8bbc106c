"""Bundles made to attack are refused by name; paths that lead elsewhere lead nowhere."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.harness import attack_bundles, known_requests
from benchmarks.chaos.harness.attack_bundles import ATTACKS, ODD_MODELS, ODD_VERSIONS, Attack
from benchmarks.chaos.harness.server_process import UNCHECKED, WATCHING, Server, serving, wait_until
from benchmarks.chaos.harness.verdict import MIB, Figures
from benchmarks.chaos.scenarios import attacks, fuzz
from benchmarks.chaos.scenarios.attacks import TRAVERSALS, model_of
from service import bundle, errors
from service.bundle import Bundle

MEMORY_BYTES = 64 * MIB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attacks")


@pytest.fixture(scope="module")
def good(folder: Path) -> Bundle:
    return attack_bundles.write_good(folder / "models" / "m" / "1")


@pytest.fixture(scope="module")
def attacked(folder: Path, good: Bundle) -> Iterator[Server]:
    """A server in whose folder all attacks have appeared while it served."""
    models = folder / "models"
    with serving(models, folder / "run", env=WATCHING | UNCHECKED) as server:
        before = server.rss()
        for number, attack in enumerate(ATTACKS):
            attack_bundles.write(attack, good, models / model_of(number) / "1")
        attack_bundles.write(ATTACKS[0], good, models / "m" / "2")
        attacks.write_odd_names(good.path, models)
        wait_until(
            lambda: len(attacks.reasons(server)) == len(ATTACKS) and 2 in server.refused(),
            "every attack is looked at",
        )
        assert server.rss() - before < MEMORY_BYTES
        yield server


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_a_reader_refuses_by_name(attack: Attack, good: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "models" / "m" / "1"
    attack_bundles.write(attack, good, path)
    with pytest.raises(errors.BundleError, match=re.escape(attack.reason)):
        bundle.read(path)


@pytest.mark.parametrize("number", range(len(ATTACKS)), ids=lambda number: ATTACKS[number].name)
def test_a_server_refuses_by_name(number: int, attacked: Server) -> None:
    assert ATTACKS[number].reason in attacks.reasons(attacked)[ATTACKS[number].name]


def test_the_good_model_goes_on(attacked: Server, good: Bundle) -> None:
    figures = Figures()
    fuzz.check_good(attacked, known_requests.ask({1: good}, count=8), figures)
    assert (figures.answered, figures.wrong, dict(figures.failed)) == (8, 0, {})
    assert ATTACKS[0].reason in attacked.refused()[2]


def test_names_that_only_look_like_a_model_or_a_version(attacked: Server) -> None:
    _, body = attacked.get("/models")
    listed = {model["name"]: model for model in json.loads(body)["models"]}
    assert not listed.keys() & set(ODD_MODELS)
    seen = {one["version"] for one in listed["m"]["versions"] + listed["m"]["refused"]}
    assert seen == {1, 2} and len(ODD_VERSIONS) > 5


@pytest.mark.parametrize("path", TRAVERSALS)
def test_a_path_that_leads_elsewhere(path: str, attacked: Server) -> None:
    figures = Figures()
    attacks.try_path(figures, attacked, path)
    assert not figures.failed, figures.notes
    assert figures.refused == 2
