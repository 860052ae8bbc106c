"""Attacks beside ordinary traffic: what `make chaos` measures, and that its criteria can fail."""

import os
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep

import pytest
from helpers.chaos.scripted_server import answer, right, server

from benchmarks.chaos import tables
from benchmarks.chaos.cost_attacks import decoding, long_calls, pipelining, tls_readers
from benchmarks.chaos.harness import (
    bundles,
    certificates,
    gzip_bodies,
    known_requests,
    mixed_traffic,
)
from benchmarks.chaos.harness.answer_check import Question
from benchmarks.chaos.harness.attackers import Attack, Attackers, AttackOutcome
from benchmarks.chaos.harness.gzip_bodies import MAX_EXPANSION
from benchmarks.chaos.harness.load import client_context
from benchmarks.chaos.harness.mixed_traffic import Ordinary, Point, compared
from benchmarks.chaos.harness.server_process import serving
from benchmarks.chaos.harness.verdict import MIB, Context, Figures
from benchmarks.engines.random_bundles import Shape
from service.bundle import Bundle
from service.settings import Limits

SHAPE = Shape(n_classes=40, n_experts=2, held=30, hidden_size=4)
ATTACK = b"GET /attack HTTP/1.1\r\nHost: a\r\n\r\n"
STATUSES = {"200": 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Bundle]:
    return bundles.write(tmp_path_factory.mktemp("mixed") / "models", [1], SHAPE)


@pytest.fixture(scope="module")
def asked(made: dict[int, Bundle]) -> list[Question]:
    return known_requests.ask(made, kinds=("json",), count=4)


@dataclass
class Fake:
    """This process as the server that is attacked."""

    port: int

    def pids(self) -> list[int]:
        return [os.getpid()]

    def kill(self) -> None:
        raise AssertionError("It takes too much memory.")


# --- criteria --------------------------------------------------------------------------------


GOOD = Point(
    attack="a",
    connections=15,
    p99_ms=2.9,
    goodput=0.9,
    rejected=3,
    failed={},
    wrong=0,
    lost=0,
    memory=512 * MIB,
    memory_after=0,
    workers_lost=0,
    livez_late=0,
    alive=True,
    attacks_sent=10,
    attackers_got=STATUSES,
    attackers_cores=0.1,
    held_seconds=None,
    ratio=2.9,
)


def failing(*points: Point) -> list[str]:
    figures = Figures()
    mixed_traffic.require(figures, points)
    return [criterion.words for criterion in figures.criteria if not criterion.passed]


def test_a_good_point_passes() -> None:
    assert failing(GOOD) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ratio": 3.1}, "p99"),
        ({"ratio": None}, "p99"),
        ({"goodput": 0.4}, "half of the ordinary requests"),
        ({"failed": {"status 500": 1}}, "no 5xx"),
        ({"memory": 513 * MIB}, "512 MB"),
        ({"workers_lost": 1}, "no worker ended"),
        ({"livez_late": 1}, "/livez"),
        ({"alive": False}, "answers afterwards"),
        ({"attacks_sent": 0}, "every attack was sent"),
    ],
)
def test_each_criterion_can_fail(change: dict[str, object], words: str) -> None:
    found = failing(GOOD, replace(GOOD, **change))  # type: ignore[arg-type]
    assert len(found) == 1 and words in found[0]


def test_the_ratio_is_to_the_largest_reference() -> None:
    nothing = float("nan")
    assert compared(replace(GOOD, p99_ms=6.0), 2.0, 1.0, 1.0).ratio == 3.0
    assert compared(replace(GOOD, p99_ms=6.0), 2.0, 4.0, 1.0).ratio == 1.5
    assert compared(replace(GOOD, p99_ms=6.0), 0.4, nothing, 1.0).ratio == 6.0
    assert compared(replace(GOOD, p99_ms=None), 2.0, 1.0, 1.0).ratio is None


# --- attackers -------------------------------------------------------------------------------


def attacked(attack: Attack, port: int, until: Callable[[AttackOutcome], bool]) -> AttackOutcome:
    """Without another process, until the attackers have seen something."""
    shared = [0, 0]
    attackers = Attackers(attack, port, 2, None, shared)
    thread = threading.Thread(target=attackers.run)
    thread.start()
    deadline = monotonic() + 30.0
    while not until(attackers.outcome) and monotonic() < deadline:
        sleep(0.005)
    shared[0] = 1
    thread.join()
    assert until(attackers.outcome), attackers.outcome
    return attackers.outcome


def test_attackers_ask_again_on_new_connections() -> None:
    with server(lambda _: answer(b"x" * 100_000)) as port:
        attack = Attack("a", ATTACK, pause=0.0)
        found = attacked(attack, port, lambda seen: seen.got["200"] >= 6)
    assert found.sent >= 6 and set(found.got) == {"200"}


def test_attackers_see_ends_and_leave_when_their_patience_ends() -> None:
    with server(lambda _: None) as port:
        attack = Attack("a", ATTACK, pause=0.0)
        assert attacked(attack, port, lambda seen: seen.got["closed"] >= 4)
    with server(lambda _: b"") as port:
        attack = Attack("a", ATTACK, pause=0.0, patience=0.05)
        assert attacked(attack, port, lambda seen: seen.got["left"] >= 4)


def test_attackers_read_every_answer_of_a_pipeline() -> None:
    request = pipelining.pipeline(ATTACK)
    count = request.count(b"GET /attack")
    assert len(request) >= 2**18 and request.count(b"Connection: close") == 1

    def reply(received: bytes) -> bytes:
        return answer(b"x" * 10) * received.count(b"GET ")

    with server(reply) as port:
        attack = Attack("a", request, reads="all", piece=100_000)
        found = attacked(attack, port, lambda seen: seen.got["200"] >= count)
    assert found.sent == 2


def test_attackers_leave_good_answers_unread() -> None:
    with server(lambda _: answer(b"x" * 100_000)) as port:
        attack = Attack("a", ATTACK, reads="status")
        found = attacked(attack, port, lambda seen: len(seen.unread) == 2)
    assert found.sent == found.got["200"] == 2


def test_bombs_are_small_until_they_are_expanded() -> None:
    for attack in (*decoding.made(), *long_calls.made(), *tls_readers.made()):
        assert len(attack.request) < 100_000, attack.name
    body = bytes(2**22)
    assert len(gzip_bodies.smallest(body)) < len(body) / 900
    allowed = gzip_bodies.allowed(body)
    assert zlib.decompress(allowed, 31) == body
    assert len(body) / MAX_EXPANSION < len(allowed) < len(body) / 90
    assert Limits().max_expansion == MAX_EXPANSION


# --- ordinary traffic beside them ------------------------------------------------------------


def run_beside(asked: list[Question], reply: Callable[[bytes], bytes | None]) -> Point:
    with server(reply) as port:
        ordinary = Ordinary(asked, seconds=0.3, livez_seconds=30.0)
        point, _ = mixed_traffic.beside(Fake(port), Attack("a", ATTACK), 1, ordinary, idle=0)
        return point


def test_what_ordinary_clients_suffer_is_seen(asked: list[Question]) -> None:
    """They are served well until the attack begins, and then not at all."""
    attack_begun = threading.Event()
    by_request = {question.request: right(question) for question in asked}

    def reply(request: bytes) -> bytes | None:
        if request == ATTACK:
            attack_begun.set()
        if request not in by_request:
            return answer(b"{}")
        return answer(b"{}", 500) if attack_begun.is_set() else by_request[request]

    point = run_beside(asked, reply)
    assert point.failed["status 500"] > 10 and not point.lost
    assert point.goodput < 0.5
    assert point.attackers_got["200"] >= 1 and point.alive


@pytest.mark.parametrize("tls", [False, True])
def test_a_harmless_attack_is_borne(
    tls: bool, made: dict[int, Bundle], asked: list[Question], tmp_path: Path
) -> None:
    """A real server; nothing of this depends on how fast the machine is but p99 and /livez."""
    figures, context = Figures(), Context(tmp_path, quick=True)
    issued = certificates.issue(tmp_path / "tls")
    start = partial(
        serving,
        made[1].path.parents[1],
        tmp_path / "run",
        *(issued.flags if tls else ()),
        tls=client_context(issued.ca) if tls else None,
    )
    attack = Attack("probes", b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n", connections=(1,))
    points = mixed_traffic.attack_each(
        context, figures, [attack], start, asked, ca=issued.ca if tls else None, quick=0.5
    )
    mixed_traffic.require(figures, points)
    speed = ("p99", "/livez", "at least half")
    failed = [one for one in figures.criteria if not one.passed and not one.words.startswith(speed)]
    assert not failed, figures.notes
    assert set(points[0].attackers_got) == {"200"}
    results = {
        "machine": {"cores": 2, "cpu": "x"},
        "command": "y",
        "scenarios": {"a": {"title": "t", "seconds": 1.0, "not_run": None} | figures.as_json()},
    }
    assert "| t | probes | 1 |" in tables.render(results)
