"""The page of /metrics: its text, and that it is built beside the event loop, one at a time."""

import asyncio
import sys
import threading
from itertools import count

import pytest
from helpers.fake_engine import result_of
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest

from service.bundle import Bundle
from service.telemetry.metrics import page
from service.telemetry.metrics.exposition import text
from service.telemetry.metrics.page import MetricsPage
from service.telemetry.metrics.registry import Metrics


class Builder:
    """Each page is its number, and is finished when the test says so."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.most_at_once = 0
        self.intervals: list[float] = []
        self._running = 0
        self._numbers = count()

    def __call__(self) -> bytes:
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        self.intervals.append(sys.getswitchinterval())
        self.begun.release()
        assert self.may_end.acquire(timeout=60)
        self._running -= 1
        return b"%d" % next(self._numbers)

    async def wait_until_begun(self) -> None:
        """The event loop goes on meanwhile."""
        assert await asyncio.to_thread(self.begun.acquire, timeout=60)


async def ask(shared: MetricsPage, clients: int) -> list[asyncio.Task[bytes]]:
    tasks = [asyncio.create_task(shared.get()) for _ in range(clients)]
    await asyncio.sleep(0)  # each has asked
    return tasks


def test_any_number_of_scrapes_is_one_page_under_way_and_one_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page, "SHARE", 1.0)

    async def scrape() -> None:
        builder = Builder()
        shared = MetricsPage(builder)
        first = await ask(shared, 1)
        await builder.wait_until_begun()
        later = await ask(shared, 60)
        builder.may_end.release(2)
        assert await asyncio.gather(*first) == [b"0"]
        assert await asyncio.gather(*later) == [b"1"] * 60, "none has counts from before it asked"
        assert builder.most_at_once == 1

    asyncio.run(scrape())


def test_a_client_that_leaves_takes_no_page_from_others() -> None:
    async def scrape() -> None:
        builder = Builder()
        leaving, staying = await ask(MetricsPage(builder), 2)
        await builder.wait_until_begun()
        leaving.cancel()
        builder.may_end.release()
        assert await staying == b"0"

    asyncio.run(scrape())


def test_a_page_that_fails_fails_who_asked_and_nobody_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page, "SHARE", 1.0)
    outcomes = iter([ZeroDivisionError("none"), b"good"])

    def build() -> bytes:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def scrape() -> None:
        shared = MetricsPage(build)
        with pytest.raises(ZeroDivisionError):
            await shared.get()
        assert await shared.get() == b"good"

    asyncio.run(scrape())


def test_who_asks_again_and_again_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = [0.0], list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += max(seconds, 0.0)

    def build() -> bytes:
        clock[0] += 2.0
        return b""

    async def scrape() -> None:
        shared = MetricsPage(build)
        for _ in range(3):
            await shared.get()

    monkeypatch.setattr(page, "monotonic", lambda: clock[0])
    monkeypatch.setattr(page.asyncio, "sleep", sleep)
    asyncio.run(scrape())
    assert slept == [0.0, 8.0, 8.0], "building takes a fifth of the time"


def test_other_threads_get_the_interpreter_soon_while_a_page_is_built() -> None:
    async def scrape() -> None:
        builder = Builder()
        builder.may_end.release()
        await MetricsPage(builder).get()
        assert builder.intervals == [page.SWITCH_SECONDS]

    before = sys.getswitchinterval()
    asyncio.run(scrape())
    assert sys.getswitchinterval() == before


def test_the_text_is_what_prometheus_client_writes(tiny: Bundle) -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    metrics = Metrics(registry)
    for version in (1, 2):
        model = metrics.model('ti\\ny\n"{é}', version, tiny, own_series=1)
        model.executed([0.0, 0.25], 3, 1e-5, result_of(0.1, [1, 2, 0], [0.5, 1e-7, 0.0]))
    metrics.http.answered("/topk", "POST", 200, 0.01)
    metrics.rejected("", "queue-full")
    for number, value in enumerate((float("inf"), float("-inf"), float("nan"), 1e300, -2.5)):
        Gauge(f"n{number}", 'A "text"\nwith \\ lines', registry=registry).set(value)
    # CPU time and memory are read anew by each of the two.
    assert steady(text(registry.collect())) == steady(generate_latest(registry))


def steady(written: bytes) -> list[bytes]:
    return [line for line in written.splitlines() if not line.startswith(b"process_")]


def test_a_label_that_is_no_unicode_costs_nobody_the_page() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.rejected("a\ud800b", "queue-full")
    metrics.rejected("good", "queue-full")
    written = text(registry.collect())
    assert b'dss_rejected_requests_total{model="a?b",reason="queue-full"} 1.0\n' in written
    assert b'dss_rejected_requests_total{model="good",reason="queue-full"} 1.0\n' in written
