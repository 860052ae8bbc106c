"""Load from a process of its own, which checks every answer.

Closed loop: every connection sends its next request when its answer is complete. Open loop:
requests are due at random moments (a Poisson process) whatever the server does, as those of many
clients are, and their time counts from when they were due, so a server that stalls cannot hide it.
"""

import gc
import multiprocessing
import selectors
import socket
import ssl
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.chaos.harness.answer_check import Checker, Question
from benchmarks.chaos.harness.verdict import Figures
from service.bench.http_reader import (
    ANSWER_SECONDS,
    HOST,
    STATUS,
    AnswerNotUnderstood,
    AnswerReader,
    problem,
)

RECEIVE_BYTES = 2**18
TICK_SECONDS = 0.1  # how often hangs are looked for
JOIN_SECONDS = 60.0
STOP, SENT, ANSWERED, FAILED, PORT = range(5)  # what both processes see
WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(frozen=True)
class Plan:
    port: int
    questions: Sequence[Question]
    connections: int = 8
    rate: float | None = None  # requests a second on average; None: closed loop
    seconds: float | None = None  # None: until it is stopped
    patience: float = ANSWER_SECONDS  # then an answer is a hang
    ca: Path | None = None  # the authority of a server that speaks TLS


@dataclass
class Outcome:
    """Times are of the monotonic clock, which all processes of a machine share."""

    sent: int = 0
    wrong: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    lost: list[tuple[float, int]] = field(default_factory=list)  # when, on which local port
    failures: "array[float]" = field(default_factory=lambda: array("d"))  # when each came
    finished: "array[float]" = field(default_factory=lambda: array("d"))  # right answers: when
    seconds: "array[float]" = field(default_factory=lambda: array("f"))  # and after how long
    service: "array[float]" = field(default_factory=lambda: array("f"))  # since they were sent
    overdue: "array[float]" = field(default_factory=lambda: array("f"))  # never sent; how late
    rejections: "array[float]" = field(default_factory=lambda: array("f"))  # how long 429 took
    notes: list[str] = field(default_factory=list)
    begun: float = 0.0
    ended: float = 0.0
    cpu_seconds: float = 0.0

    def fail(self, kind: str, text: str = "") -> None:
        self.failed[kind] += 1
        self.failures.append(monotonic())
        if text and len(self.notes) < 10:
            self.notes.append(f"{kind}: {text}")

    @property
    def answered(self) -> int:
        return len(self.finished)

    @property
    def rejected(self) -> int:
        return self.statuses[429]

    def percentile(self, share: float, since: float = 0.0, until: float = np.inf) -> float:
        """Milliseconds, of the right answers that came in a span of time."""
        times = np.frombuffer(self.finished, np.float64)
        chosen = np.frombuffer(self.seconds, np.float32)[(times >= since) & (times < until)]
        return float(np.percentile(chosen, share) * 1000) if chosen.size else float("nan")

    def rate(self) -> float:
        """Right answers a second."""
        return self.answered / max(self.ended - self.begun, 1e-9)

    def longest_silence(self, since: float, until: float) -> float:
        """Seconds without any right answer."""
        times = np.sort(np.frombuffer(self.finished, np.float64))
        inside: NDArray[np.float64] = times[(times >= since) & (times <= until)]
        return float(np.diff(np.concatenate([[since], inside, [until]])).max())

    def counted_in(self, figures: Figures) -> None:
        figures.sent += self.sent
        figures.answered += self.answered
        figures.rejected += self.rejected
        figures.wrong += self.wrong
        figures.lost += len(self.lost)
        figures.failed += self.failed
        for text in self.notes:
            figures.note(text)


class Connection:
    __slots__ = ("due", "number", "reader", "sent", "socket", "unsent")

    def __init__(self, made: socket.socket) -> None:
        self.socket = made
        self.reader = AnswerReader()
        self.number = -1  # of the question under way
        self.due = 0.0
        self.sent = 0.0
        self.unsent: memoryview | None = None


class Running:
    """Load under way; `finish` stops it and says what it saw."""

    def __init__(self, shared: Any, results: Any, process: Any) -> None:  # noqa: ANN401
        self._shared, self._results, self._process = shared, results, process

    @property
    def answered(self) -> int:
        return int(self._shared[ANSWERED])

    @property
    def failed(self) -> int:
        return int(self._shared[FAILED])

    @property
    def sent(self) -> int:
        return int(self._shared[SENT])

    def move_to(self, port: int) -> None:
        """New connections go to another server; those that are open stay."""
        self._shared[PORT] = port

    def finish(self, stop: bool = True) -> Outcome:
        if stop:
            self._shared[STOP] = 1
        outcome: Outcome = self._results.recv()
        self._process.join(JOIN_SECONDS)
        return outcome

    def wait_for_answers(self, more: int, seconds: float = 30.0) -> None:
        """Until as many more requests have been answered."""
        wanted, deadline = self.answered + more, monotonic() + seconds
        while self.answered < wanted and monotonic() < deadline:
            time.sleep(0.005)


@contextmanager
def loading(plan: Plan) -> Iterator[Running]:
    context = multiprocessing.get_context("spawn")
    shared = RawArray("q", 5)
    results, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(plan, shared, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Running(shared, results, process)
    finally:
        if process.is_alive():
            process.kill()
        process.join()


def run(plan: Plan) -> Outcome:
    """Load for the plan's time."""
    with loading(plan) as load:
        return load.finish(stop=False)


def client_context(ca: Path) -> ssl.SSLContext:
    """Of a client that knows the server by its authority."""
    return ssl.create_default_context(cafile=str(ca))


def _main(plan: Plan, shared: Any, results: Any) -> None:  # noqa: ANN401
    results.send(Generator(plan, shared).run())
    results.close()


class Generator:
    def __init__(self, plan: Plan, shared: Any) -> None:  # noqa: ANN401
        self._plan = plan
        self._shared = shared
        self._selector = selectors.DefaultSelector()
        self._checker = Checker(plan.questions)
        self._requests = [question.request for question in plan.questions]
        self._next = 0
        self._idle: deque[Connection] = deque()
        self._busy: set[Connection] = set()
        self._missing = 0  # connections to be made again
        self._due = 0.0  # when the next request is
        self._random = Random(0)  # noqa: S311
        self._outcome = Outcome()
        self._tls = client_context(plan.ca) if plan.ca else None

    def run(self) -> Outcome:
        plan, outcome = self._plan, self._outcome
        self._missing = plan.connections
        self._connect()
        gc.disable()  # a collection would look like a slow answer
        outcome.begun = begun = tick = monotonic()
        cpu = time.process_time()
        ends = begun + plan.seconds if plan.seconds else float("inf")
        self._due = begun
        while (now := monotonic()) < ends and not self._shared[STOP]:
            if now >= tick:
                tick = now + TICK_SECONDS
                self._find_hangs(now)
                if self._missing:
                    self._connect()
            wait = self._send_due(now) if plan.rate else self._send_all(now)
            self._receive(min(wait, tick - now, ends - now))
        outcome.ended = monotonic()
        outcome.cpu_seconds = time.process_time() - cpu
        self._count_overdue()
        self._take_last_answers()
        gc.enable()
        for connection in [*self._idle, *self._busy]:
            connection.socket.close()
        return outcome

    # --- sending -----------------------------------------------------------------------------

    def _send_all(self, now: float) -> float:
        while self._idle:
            self._send(self._idle.popleft(), now)
        return TICK_SECONDS

    def _send_due(self, now: float) -> float:
        """Send what is due; how long until the next is."""
        assert self._plan.rate is not None  # noqa: S101
        while self._idle:
            if self._due > now:
                return self._due - now
            self._send(self._idle.popleft(), self._due)
            self._due += self._random.expovariate(self._plan.rate)
        return TICK_SECONDS

    def _count_overdue(self) -> None:
        """Requests that were due, and for which there was never a free connection."""
        while self._plan.rate and self._due < self._outcome.ended:
            self._outcome.overdue.append(self._outcome.ended - self._due)
            self._due += self._random.expovariate(self._plan.rate)

    def _send(self, connection: Connection, due: float) -> None:
        number = self._next
        self._next = (number + 1) % len(self._requests)
        connection.number, connection.due, connection.sent = number, due, monotonic()
        self._busy.add(connection)
        self._outcome.sent += 1
        self._shared[SENT] += 1
        self._push(connection, memoryview(self._requests[number]))

    def _push(self, connection: Connection, rest: memoryview) -> None:
        try:
            rest = rest[connection.socket.send(rest) :]
        except WOULD_BLOCK:
            pass
        except OSError as error:
            self._drop(connection, type(error).__name__)
            return
        was_waiting = connection.unsent is not None
        connection.unsent = rest if rest else None
        if was_waiting != bool(rest):
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if rest else 0)
            self._selector.modify(connection.socket, events, connection)

    # --- receiving ---------------------------------------------------------------------------

    def _receive(self, wait: float) -> None:
        for key, events in self._selector.select(max(wait, 0.0)):
            connection: Connection = key.data
            if events & selectors.EVENT_WRITE and connection.unsent is not None:
                self._push(connection, connection.unsent)
            if events & selectors.EVENT_READ and connection.socket.fileno() >= 0:
                self._read(connection)

    def _read(self, connection: Connection) -> None:
        self._take(connection)
        # What TLS has decrypted already makes no socket readable.
        while self._tls is not None and connection.socket.fileno() >= 0:
            if not connection.socket.pending():  # type: ignore[attr-defined]
                return
            self._take(connection)

    def _take(self, connection: Connection) -> None:
        try:
            packet = connection.socket.recv(RECEIVE_BYTES)
        except WOULD_BLOCK:
            return
        except OSError as error:
            self._drop(connection, type(error).__name__)
            return
        if not packet:
            self._drop(connection, "closed")
            return
        try:
            answer = connection.reader.feed(packet)
        except AnswerNotUnderstood:
            self._outcome.wrong += 1
            self._drop(connection, "not HTTP")
            return
        if answer is not None:
            self._settle(connection, answer)

    def _settle(self, connection: Connection, answer: bytes) -> None:
        now, outcome = monotonic(), self._outcome
        if connection.number < 0:
            self._drop(connection, "unasked answer")
            return
        status = int(answer[STATUS])
        outcome.statuses[status] += 1
        if status == 200:
            wrong = self._checker.why_wrong(connection.number, answer)
            if wrong is None:
                outcome.finished.append(now)
                outcome.seconds.append(now - connection.due)
                outcome.service.append(now - connection.sent)
                self._shared[ANSWERED] += 1
            else:
                outcome.wrong += 1
                outcome.notes.append(f"question {connection.number}: {wrong}")
        elif status == 429:
            outcome.rejections.append(now - connection.sent)
        else:
            outcome.fail(f"status {status}", problem(answer))
            self._shared[FAILED] += 1
        self._busy.discard(connection)
        connection.number = -1
        if b"\r\nconnection: close\r\n" in answer[:1024].lower():
            self._close(connection)
        else:
            self._idle.append(connection)

    # --- connections -------------------------------------------------------------------------

    def _connect(self) -> None:
        while self._missing:
            made = socket.socket()
            try:
                made.settimeout(self._plan.patience)
                made.connect((HOST, self._shared[PORT] or self._plan.port))
                if self._tls is not None:
                    made = self._tls.wrap_socket(made, server_hostname=HOST)
            except OSError as error:
                made.close()
                self._outcome.fail("no connection", str(error))
                return
            made.setblocking(False)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._missing -= 1
            connection = Connection(made)
            self._selector.register(made, selectors.EVENT_READ, connection)
            self._idle.append(connection)

    def _drop(self, connection: Connection, kind: str) -> None:
        """The server has ended a connection; a request on it is lost unless it was idle."""
        if connection.number >= 0:
            self._lose(connection, kind)
        self._close(connection)

    def _lose(self, connection: Connection, kind: str) -> None:
        port = -1
        with suppress(OSError):
            port = connection.socket.getsockname()[1]
        whole = connection.unsent is None
        self._outcome.fail(kind, "with a request under way")
        self._shared[FAILED] += 1
        if whole:
            self._outcome.lost.append((monotonic(), port))

    def _close(self, connection: Connection) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        self._busy.discard(connection)
        with suppress(ValueError):
            self._idle.remove(connection)
        connection.socket.close()
        self._missing += 1

    def _find_hangs(self, now: float) -> None:
        for connection in list(self._busy):
            if now - connection.sent > self._plan.patience:
                self._lose(connection, "hang")
                self._close(connection)

    def _take_last_answers(self) -> None:
        deadline = monotonic() + self._plan.patience
        while self._busy and monotonic() < deadline:
            self._receive(TICK_SECONDS)
        for connection in list(self._busy):
            self._lose(connection, "hang")
