"""Clients that offer HTTP/2 (`Upgrade: h2c`), as curl --http2 and Java's HttpClient do.

They are answered in HTTP/1.1, wherever the network cuts their request in two, and nothing of a body
is taken for another request.
"""

import time
from collections.abc import Iterable

from benchmarks.chaos.harness import bundles, known_requests
from benchmarks.chaos.harness.answer_check import END, Checker, Question
from benchmarks.chaos.harness.load import Plan, loading
from benchmarks.chaos.harness.server_process import serving
from benchmarks.chaos.harness.verdict import Context, Figures
from service.bench.http_reader import ExchangeFailed, RawConnection

TITLE = "clients that offer HTTP/2, their requests cut anywhere"
SETTINGS = "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
OFFERS = {
    "curl --http2": f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n{SETTINGS}",
    "Java": f"Connection: Upgrade, HTTP2-Settings\r\n{SETTINGS}Upgrade: h2c\r\n",
    "websocket": "Connection: Upgrade\r\nUpgrade: websocket\r\n",
}
APART_SECONDS = 0.002  # long enough for the server to receive what was sent before


def run(context: Context) -> Figures:
    figures = Figures()
    asked = known_requests.ask(bundles.write(context.folder / "models", [1]))
    every = context.count(37, 3)  # how many bytes of a head lie between two cuts
    one_of_each = {question.kind: question for question in reversed(asked)}.values()
    with (
        serving(context.folder / "models", context.folder / "run") as server,
        loading(Plan(server.port, asked, connections=8, rate=200)) as load,
    ):
        load.wait_for_answers(100)
        for words, offer in OFFERS.items():
            context.say(words)
            for question in one_of_each:
                request = with_offer(question.request, offer)
                for cut in _cuts(request, every):
                    exchange(figures, server.port, question, request, cut)
        outcome = load.finish()
    outcome.counted_in(figures)
    figures.p50_ms, figures.p99_ms = outcome.percentile(50), outcome.percentile(99)
    figures.require_right()
    words = "every offer is answered in HTTP/1.1, and nothing else is"
    figures.require(words, not figures.failed, dict(figures.failed) or 0)
    figures.require_none_lost()
    return figures


def with_offer(request: bytes, offer: str) -> bytes:
    line, _, rest = request.partition(b"\r\n")
    return line + b"\r\n" + offer.encode() + rest


def _cuts(request: bytes, every: int) -> Iterable[int]:
    """Everywhere in the head, around its end, and in some places of the body."""
    head = request.index(END) + len(END)
    around = range(head - 5, min(head + 6, len(request)))
    body = range(head, len(request), max(1, (len(request) - head) // 16))
    return sorted({0, *range(1, head, every), *around, *body})


def exchange(figures: Figures, port: int, question: Question, request: bytes, cut: int) -> None:
    """The request in two packets, then an ordinary one on the same connection."""
    checker = Checker([question])
    with RawConnection(port) as connection:
        for packet in filter(None, (request[:cut], request[cut:])):
            connection.send(packet)
            time.sleep(APART_SECONDS)
        for number in range(2):
            if number == 1:
                connection.send(question.request)
            figures.sent += 1
            try:
                answer = connection.answer()
            except ExchangeFailed as error:
                figures.fail("no answer", f"cut at {cut}: {error!r}")
                return
            if answer.status != 200:
                figures.fail(f"status {answer.status}", f"cut at {cut}: {answer.body[:200]!r}")
                return
            if wrong := checker.why_wrong(0, answer.head + END + answer.body):
                figures.wrong += 1
                figures.note(f"cut at {cut}: {wrong}")
                return
            figures.answered += 1
            if answer.closes:
                break
        if more := connection.rest():
            figures.fail("unasked answer", f"cut at {cut}: {more[:100]!r}")
