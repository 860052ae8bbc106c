"""Bytes that are nearly requests: none is answered with 5xx, none hangs, memory stays flat.

Whatever is answered with 200 must be what the engine says about the body as the standard library
reads it.
"""

import io
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from benchmarks.chaos.harness import answer_check, bundles, known_requests
from benchmarks.chaos.harness.answer_check import END, UNREADABLE, Arrays, Checker, Question, Reply
from benchmarks.chaos.harness.mutations import Case, Maker
from benchmarks.chaos.harness.server_process import Server, serving
from benchmarks.chaos.harness.verdict import Context, Figures
from service.bench.http_reader import (
    ANSWER_SECONDS,
    Answer,
    AnswerNotUnderstood,
    ConnectionEnded,
    ExchangeFailed,
    NoAnswer,
    RawConnection,
    ask_once,
    statuses,
)
from service.bench.proc_stats import is_running
from service.engine import Engine

TITLE = "byte-level fuzz of heads and bodies"
QUICK_REQUESTS = 1500
ROUND = 500  # cases between two looks at a good request
CONTENT_TYPE = re.compile(rb"\r\ncontent-type: *([a-z/-]+)", re.IGNORECASE)
USUAL_K = 10
KINDS = {NoAnswer: "hang", ConnectionEnded: "no answer", AnswerNotUnderstood: "not HTTP"}


@dataclass
class Fuzzer:
    port: int
    maker: Maker
    engine: Engine
    seconds: float = ANSWER_SECONDS  # then an answer is a hang
    figures: Figures = field(default_factory=Figures)
    ended: int = 0  # connections closed without an answer, where none was owed
    by_status: Counter[int] = field(default_factory=Counter)
    _connection: RawConnection | None = None

    def run(self, number: int) -> None:
        case = self.maker.case(number)
        self.figures.sent += case.owed or 1
        try:
            if case.owed is None:
                self._send_alone(case, number)
            else:
                self._send(case, number)
        except ExchangeFailed as error:
            self.figures.fail(KINDS[type(error)], self._name(case, number))
            self._disconnect()

    def close(self) -> None:
        self._disconnect()

    def _send_alone(self, case: Case, number: int) -> None:
        """What may end its connection has one of its own."""
        with RawConnection(self.port, self.seconds) as connection:
            connection.send(case.data)
            found = statuses(connection.rest())
        self.ended += not found
        for status in found:
            self._count(status, case, number)

    def _send(self, case: Case, number: int) -> None:
        assert case.owed  # noqa: S101
        if self._connection is None:
            self._connection = RawConnection(self.port, self.seconds)
        self._connection.send(case.data)
        for _ in range(case.owed):
            received = self._connection.answer()
            self._count(received.status, case, number)
            if received.status == 200:
                self._check(case, received, number)
            if received.closes:
                self._disconnect()
                return

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _count(self, status: int, case: Case, number: int) -> None:
        if status < 200:
            return
        self.by_status[status] += 1
        if status == 200:
            self.figures.answered += 1
        elif status == 429:
            self.figures.rejected += 1
        elif status < 500 or (status == 504 and _sets_a_time(case)):
            self.figures.refused += 1
        else:
            self.figures.fail(f"status {status}", self._name(case, number))

    def _check(self, case: Case, received: Answer, number: int) -> None:
        try:
            expected, given = self._expected(case), _given(case, received)
        except UNREADABLE as error:
            wrong: str | None = f"answered 200, but: {error!r:.120}"
        else:
            wrong = answer_check.differs(given, expected, list(given))
        if wrong:
            self.figures.wrong += 1
            self.figures.note(f"{wrong}: {self._name(case, number)}")

    def _expected(self, case: Case) -> Reply:
        hidden, k, experts = _understood(case)
        k = min(USUAL_K, self.engine.n_reachable) if k is None else k
        return known_requests.reply_of(self.engine, 1, hidden.astype(np.float32), k, experts)

    def _name(self, case: Case, number: int) -> str:
        return f"seed {self.maker.seed} case {number} ({case.label}) {case.data[:60]!r}"


def _sets_a_time(case: Case) -> bool:
    """A request may ask for its answer within a microsecond."""
    return b'"timeout"' in case.data or b"DSS-Timeout" in case.data


def _understood(case: Case) -> tuple[Any, int | None, int]:
    """Rows, k and experts of a body, as the standard library and numpy read it."""
    if _media_type(case) == "npy":
        query = dict(parse_qsl(case.path.partition("?")[2]))
        k = int(query["k"]) if "k" in query else None
        return np.load(io.BytesIO(case.body)), k, int(query.get("experts", 1))
    if not case.kind.startswith("v2"):
        document = json.loads(case.body)
        hidden = np.array(document["inputs"], np.float64)
        return hidden, document.get("k"), document.get("experts", 1)
    ends = int((case.headers or {}).get("Inference-Header-Content-Length", len(case.body)))
    document = json.loads(case.body[:ends])
    tensor, parameters = document["inputs"][0], document.get("parameters", {})
    if "binary_data_size" in tensor.get("parameters", {}):
        values = np.frombuffer(case.body[ends:], "<f4")
    else:
        values = np.array(tensor["data"], np.float64)
    return values.reshape(tensor["shape"]), parameters.get("k"), parameters.get("experts", 1)


def _media_type(case: Case) -> str:
    if case.kind.startswith("v2"):
        return case.kind
    return "npy" if "npy" in (case.headers or {})["Content-Type"].lower() else "json"


def _given(case: Case, received: Answer) -> Arrays:
    kind = case.kind
    if not kind.startswith("v2"):
        found = CONTENT_TYPE.search(received.head)
        kind = "npy" if found and b"npy" in found[1] else "json"
    return answer_check.read_arrays(kind, received.head, received.body)[1]


def run(context: Context) -> Figures:
    made = bundles.write(context.folder / "models", [1])
    good = known_requests.ask(made, count=8)
    wanted = QUICK_REQUESTS if context.quick else context.requests
    with serving(context.folder / "models", context.folder / "run") as server:
        maker = Maker(context.seed, bundles.SMALL.hidden_size)
        fuzzer = Fuzzer(server.port, maker, Engine(made[1]))
        figures = fuzzer.figures
        number = round_ = 0
        while figures.sent < wanted and is_running(server.process.pid):
            fuzzer.run(number)
            number += 1
            if number % ROUND == 0:
                round_ += 1
                check_good(server, good, figures)
                if figures.rss_start is None and figures.sent >= wanted / 10:
                    figures.rss_start, figures.fds_start = server.rss(), server.descriptors()
                if round_ % 20 == 0:
                    context.say(f"{figures.sent:,} requests, {dict(fuzzer.by_status)}")
        fuzzer.close()
        check_good(server, good, figures)
        alive = is_running(server.process.pid)
        figures.rss_end, figures.fds_end = server.rss(), server.descriptors()
        traces = server.log_text().count("Traceback")
    figures.facts = {
        "seed": context.seed,
        "cases": number,
        "connections ended without an answer": fuzzer.ended,
        "statuses": dict(sorted(fuzzer.by_status.items())),
        "tracebacks in the log": traces,
    }
    figures.require("no 5xx, no hang, no missing answer", not figures.failed, dict(figures.failed))
    figures.require("the server lives", alive)
    figures.require("no traceback in its log", not traces, traces)
    figures.require_right()
    figures.require_flat_memory()
    return figures


def check_good(server: Server, good: list[Question], figures: Figures) -> None:
    """A good request of every kind is still answered, and rightly."""
    checker = Checker(good)
    for number, question in enumerate(good):
        figures.sent += 1
        try:
            received = ask_once(server.port, question.request)
        except (ExchangeFailed, OSError) as error:
            figures.fail("good request", repr(error))
            continue
        answer = received.head + END + received.body
        if received.status != 200:
            figures.fail(f"good request: status {received.status}")
        elif wrong := checker.why_wrong(number, answer):
            figures.wrong += 1
            figures.note(wrong)
        else:
            figures.answered += 1
