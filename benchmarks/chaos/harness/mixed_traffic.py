"""Ordinary traffic beside attackers: what the ordinary clients notice, and what the server takes.

Ordinary clients have their connections before the attack begins, and send known questions in an
open loop. Their p99 beside an attack is divided by a reference, the largest of

- their p99 without any attack, on the same server just before;
- their p99 beside as many attackers that send one ordinary request each time instead, in the same
  closed loop: server, load generator and attackers share the machine's cores, and that much a
  harmless client would cost too;
- what one call may take on the event loop by default (`queue.inline_seconds`, 1 ms): an ordinary
  request behind another ordinary one waits as long.

All are in the table, so that the ratio can be made with another one.

A pause of 30 ms of the whole machine makes a p99 of 3 seconds. So a point whose ratio is too large
is measured again, twice at most, with its references: what the server does happens each time. The
smallest ratio counts; everything else counts from all tries.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic

import numpy as np

from benchmarks.chaos.harness.answer_check import Question
from benchmarks.chaos.harness.attackers import Attack, attacking
from benchmarks.chaos.harness.load import Outcome, Plan, loading
from benchmarks.chaos.harness.server_process import NeverHappened, wait_until
from benchmarks.chaos.harness.verdict import MIB, Context, Figures
from benchmarks.chaos.harness.watch import LIVEZ_SECONDS, Target, lives, resident, watching
from service.bench import proc_stats
from service.bench.http_reader import ANSWER_SECONDS

RATE, CONNECTIONS = 400.0, 8  # of the ordinary clients
P99_RATIO = 3.0
TRIES = 3
FLOOR_MS = 1.0  # queue.inline_seconds
QUICK_FLOOR_MS = 200.0  # the quick form runs beside other tests
QUICK_CONNECTIONS = (1, 15)
MEMORY_BYTES = 512 * MIB
LEAST_GOODPUT = 0.5  # the others may be answered with 429
RECOVERY_SECONDS = 30.0
HARMLESS = "ordinary requests"

Start = Callable[[], AbstractContextManager[Target]]


@dataclass(frozen=True)
class Point:
    """One attack from some connections."""

    attack: str
    connections: int
    p99_ms: float | None  # of the ordinary clients; None: there was no answer
    goodput: float  # the share of what was due that was answered rightly
    rejected: int
    failed: dict[str, int]
    wrong: int
    lost: int
    memory: int  # bytes above idle, at most
    memory_after: int
    workers_lost: int
    livez_late: int
    alive: bool
    attacks_sent: int
    attackers_got: dict[str, int]
    attackers_cores: float
    held_seconds: float | None  # how long the server kept a client that does not read, at most
    workers: int = 1
    p99_without_ms: float | None = None
    p99_harmless_ms: float | None = None
    ratio: float | None = None  # to the reference
    tries: int = 1

    @property
    def words(self) -> str:
        return f"{self.attack} from {self.connections}"


@dataclass
class Ordinary:
    """The traffic beside the attacks, and how long a point lasts."""

    asked: Sequence[Question]
    seconds: float
    ca: Path | None = None
    livez_seconds: float = LIVEZ_SECONDS

    def plan(self, port: int) -> Plan:
        return Plan(port, self.asked, CONNECTIONS, rate=RATE, ca=self.ca)


def attack_each(
    context: Context,
    figures: Figures,
    attacks: Sequence[Attack],
    start: Start,
    asked: Sequence[Question],
    *,
    ca: Path | None = None,
    seconds: float = 3.0,
    quick: float = 2.0,
    workers: int = 1,
    harmless: bool = True,
) -> list[Point]:
    """Every attack against a server of its own; `require` then takes the points of all.

    Unless `harmless` is off, harmless attackers come first, to the first server.
    """
    ordinary = Ordinary(asked, context.choose(quick, seconds), ca)
    if context.quick:
        ordinary.livez_seconds = 5 * LIVEZ_SECONDS
    chosen = {attack.name: _connections(context, attack) for attack in attacks}
    counts = sorted({count for each in chosen.values() for count in each})
    harmless_p99: dict[int, float] = {}
    points: list[Point] = []
    for attack in attacks:
        with start() as server:
            if harmless and not harmless_p99:
                harmless_p99 = _beside_harmless(context, ordinary, server, counts)
            without = quietly(server, ordinary)
            idle = resident(server)
            figures.rss_start = max(figures.rss_start or 0, idle)
            for count in chosen[attack.name]:
                point = None
                for tried in range(TRIES):
                    if tried:
                        without = quietly(server, ordinary)
                        if harmless:
                            harmless_p99[count] = _harmless_p99(server, ordinary, count)
                    found, outcome = beside(server, attack, count, ordinary, idle)
                    found = compared(
                        replace(found, workers=workers),
                        without.percentile(99),
                        harmless_p99.get(count, math.nan),
                        context.choose(QUICK_FLOOR_MS, FLOOR_MS),
                    )
                    outcome.counted_in(figures)
                    point = found if point is None else better(point, found)
                    if not found.alive or (found.ratio or math.inf) <= P99_RATIO:
                        break
                points.append(point)
                figures.rss_end = max(figures.rss_end or 0, idle + point.memory)
                context.say(_said(point))
                if not point.alive:
                    break
        without.counted_in(figures)
    figures.attacks += [asdict(point) for point in points]
    return points


def _connections(context: Context, attack: Attack) -> tuple[int, ...]:
    if not context.quick:
        return attack.connections
    chosen = tuple(count for count in attack.connections if count in QUICK_CONNECTIONS)
    return chosen or QUICK_CONNECTIONS[-1:]


def _beside_harmless(
    context: Context, ordinary: Ordinary, server: Target, counts: Sequence[int]
) -> dict[int, float]:
    """The ordinary clients' p99 beside as many harmless attackers."""
    quietly(server, replace(ordinary, seconds=0.5))  # warm
    found = {count: _harmless_p99(server, ordinary, count) for count in counts}
    said = ", ".join(f"{value:.1f} ms" for value in found.values())
    context.say(f"p99 beside ordinary requests from {list(found)}: {said}")
    return found


def _harmless_p99(server: Target, ordinary: Ordinary, count: int) -> float:
    attack = Attack(HARMLESS, ordinary.asked[0].request)
    point, _ = beside(server, attack, count, ordinary, resident(server))
    return math.nan if point.p99_ms is None else point.p99_ms


def better(one: Point, other: Point) -> Point:
    """The try with the smaller ratio, and what happened in both."""
    return replace(
        min(one, other, key=lambda point: point.ratio or math.inf),
        tries=one.tries + other.tries,
        goodput=min(one.goodput, other.goodput),
        rejected=one.rejected + other.rejected,
        failed=dict(Counter(one.failed) + Counter(other.failed)),
        wrong=one.wrong + other.wrong,
        lost=one.lost + other.lost,
        memory=max(one.memory, other.memory),
        memory_after=max(one.memory_after, other.memory_after),
        workers_lost=one.workers_lost + other.workers_lost,
        livez_late=one.livez_late + other.livez_late,
        alive=one.alive and other.alive,
        attacks_sent=one.attacks_sent + other.attacks_sent,
    )


def quietly(server: Target, ordinary: Ordinary) -> Outcome:
    """The ordinary clients by themselves, after some requests that warm the server up."""
    with loading(ordinary.plan(server.port)) as load:
        load.wait_for_answers(int(RATE / 2))
        since = monotonic()
        time.sleep(ordinary.seconds)
        outcome = load.finish()
    return _from(outcome, since)


def beside(
    server: Target, attack: Attack, connections: int, ordinary: Ordinary, idle: int
) -> tuple[Point, Outcome]:
    before = server.pids()
    with loading(ordinary.plan(server.port)) as load:
        load.wait_for_answers(int(RATE / 6))
        with (
            attacking(attack, server.port, connections, ordinary.ca) as attackers,
            watching(server, idle, ordinary.ca, ordinary.livez_seconds) as watch,
        ):
            attackers.wait_until_sent()
            since = monotonic()
            watch.killed.wait(ordinary.seconds)
            outcome = load.finish()
            ended = monotonic()
            attacked = attackers.finish()
    alive = not watch.killed.is_set() and _recovers(server, ordinary)
    outcome = _from(outcome, since)
    return Point(
        attack=attack.name,
        connections=connections,
        p99_ms=_p99(outcome),
        goodput=min(1.0, outcome.answered / (RATE * max(outcome.ended - since, 1e-9))),
        rejected=outcome.rejected,
        failed=dict(outcome.failed),
        wrong=outcome.wrong,
        lost=len(outcome.lost),
        memory=watch.most_bytes - idle,
        memory_after=resident(server) - idle,
        workers_lost=sum(not proc_stats.is_running(pid) for pid in before),
        livez_late=watch.livez_late,
        alive=alive,
        attacks_sent=attacked.sent,
        attackers_got=dict(attacked.got.most_common()),
        attackers_cores=attacked.cpu_seconds / max(ended - since, 1e-9),
        held_seconds=watch.held_longest(attacked.unread),
    ), outcome


def _p99(outcome: Outcome) -> float | None:
    """Milliseconds. Who got no answer, or could not even ask, has waited as well."""
    if not outcome.answered:
        return None
    lost = np.full(len(outcome.lost), ANSWER_SECONDS)
    waited = np.concatenate([outcome.seconds, outcome.overdue, lost])
    return float(np.percentile(waited, 99) * 1000)


def _from(outcome: Outcome, since: float) -> Outcome:
    """Without the answers that came before; failures count whenever they came."""
    finished = np.frombuffer(outcome.finished, np.float64)
    first = int(np.searchsorted(finished, since))
    return replace(
        outcome,
        finished=outcome.finished[first:],
        seconds=outcome.seconds[first:],
        service=outcome.service[first:],
        sent=outcome.sent - first,
        begun=since,
    )


def compared(point: Point, without: float, harmless_p99: float, floor: float) -> Point:
    reference = max(value for value in (without, harmless_p99, floor) if not math.isnan(value))
    return replace(
        point,
        p99_without_ms=None if math.isnan(without) else without,
        p99_harmless_ms=None if math.isnan(harmless_p99) else harmless_p99,
        ratio=None if point.p99_ms is None else point.p99_ms / reference,
    )


def _said(point: Point) -> str:
    ratio = "no answer" if point.ratio is None else f"p99 {point.p99_ms:.1f} ms, {point.ratio:.2f}x"
    return (
        f"{point.words}: {ratio}, {point.goodput:.0%} answered, {point.memory / MIB:+.0f} MB,"
        f" failed {point.failed or 0}, attackers got {point.attackers_got}"
    )


# --- criteria --------------------------------------------------------------------------------


def require(figures: Figures, points: Sequence[Point]) -> None:
    """Each criterion says at which point it came nearest to failing."""
    worst = max(points, key=lambda point: math.inf if point.ratio is None else point.ratio)
    ratio = math.inf if worst.ratio is None else worst.ratio
    words = "p99 of ordinary clients beside each attack at most 3 times the reference"
    figures.require(words, ratio <= P99_RATIO, f"{ratio:.2f} times, {worst.words}")
    least = min(points, key=lambda point: point.goodput)
    words = "at least half of the ordinary requests answered, the others with 429"
    found = f"{least.goodput:.0%}, {least.words}"
    figures.require(words, least.goodput >= LEAST_GOODPUT, found)
    failed = [f"{point.words}: {point.failed}" for point in points if point.failed]
    words = "no 5xx for ordinary clients, nothing failed or lost"
    figures.require(words, not failed, "; ".join(failed) or 0)
    figures.require_right()
    most = max(points, key=lambda point: point.memory / point.workers)
    words = "at most 512 MB above idle for each worker"
    found = f"{most.memory / MIB:.0f} MB, {most.words}"
    figures.require(words, most.memory <= MEMORY_BYTES * most.workers, found)
    lost = [point.words for point in points if point.workers_lost]
    figures.require("no worker ended or was replaced", not lost, "; ".join(lost) or 0)
    late = [f"{point.words}: {point.livez_late} times" for point in points if point.livez_late]
    figures.require("/livez is answered all the time", not late, "; ".join(late) or 0)
    dead = [point.words for point in points if not point.alive]
    figures.require("the server answers afterwards", not dead, "; ".join(dead) or "it does")
    idle = [point.words for point in points if not point.attacks_sent]
    figures.require("every attack was sent", not idle, "; ".join(idle) or "all")


def _recovers(server: Target, ordinary: Ordinary) -> bool:
    """Whether it answers soon after the attackers have left."""
    with suppress(NeverHappened):
        wait_until(
            lambda: lives(server.port, LIVEZ_SECONDS, ordinary.ca),
            "the server answers again",
            RECOVERY_SECONDS,
        )
        return True
    return False
