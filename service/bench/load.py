"""Loads a server from a process of its own, so cheaply that the server is what is measured.

A closed loop: every connection sends its next request when its answer is complete. It imports
nothing but the standard library; requests are built beforehand, and times are sorted out later.
"""

import gc
import itertools
import selectors
import socket
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic, process_time

from service.bench.http_reader import AnswerNotUnderstood, AnswerReader, is_ok, problem

RECEIVE_BYTES = 2**16
CONNECT_SECONDS = 5.0
LAST_ANSWERS_SECONDS = 10.0


class NotReachable(Exception):
    """No connection could be made."""


@dataclass(frozen=True)
class Plan:
    """Times are of the monotonic clock, which all processes of a machine share."""

    host: str
    port: int
    connections: int
    requests: Sequence[bytes]
    starts: float  # what was answered before is warm-up
    ends: float


@dataclass
class Load:
    """What one generator saw; answers of the warm-up and the last ones are included."""

    finished: "array[float]" = field(default_factory=lambda: array("d"))
    seconds: "array[float]" = field(default_factory=lambda: array("d"))
    errors: int = 0
    first_error: str | None = None
    cpu_seconds: float = 0.0  # from the plan's start to its end

    def failed(self, reason: str) -> None:
        self.errors += 1
        self.first_error = self.first_error or reason


class Connection:
    __slots__ = ("reader", "sent", "socket")

    def __init__(self, plan: Plan) -> None:
        try:
            self.socket = socket.create_connection((plan.host, plan.port), CONNECT_SECONDS)
        except OSError as error:
            raise NotReachable(f"No server answers at {plan.host}:{plan.port}.") from error
        # A timeout of Python's sockets costs a system call each time; the loop has its own.
        self.socket.settimeout(None)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = AnswerReader()
        self.sent = 0.0


def generate(plan: Plan) -> Load:
    gc.disable()  # a collection would look like a slow answer
    load = Load()
    requests = itertools.cycle(plan.requests)
    with selectors.DefaultSelector() as selector:
        try:
            for _ in range(plan.connections):
                _open(plan, selector, requests, load)
            _loop(plan, selector, requests, load, plan.starts)
            cpu = process_time()
            _loop(plan, selector, requests, load, plan.ends)
            load.cpu_seconds = process_time() - cpu
            _take_last_answers(selector, load)
        finally:
            gc.enable()
            for key in list(selector.get_map().values()):
                key.data.socket.close()
    return load


def _loop(
    plan: Plan,
    selector: selectors.BaseSelector,
    requests: Iterator[bytes],
    load: Load,
    until: float,
) -> None:
    finished, seconds = load.finished.append, load.seconds.append
    while (left := until - monotonic()) > 0:
        for key, _ in selector.select(left):
            connection: Connection = key.data
            try:
                answer = connection.reader.feed(_receive(connection))
                if answer is None:
                    continue
                now = monotonic()
                if is_ok(answer):
                    finished(now)
                    seconds(now - connection.sent)
                else:
                    load.failed(problem(answer))
                connection.sent = now
                connection.socket.sendall(next(requests))
            except (OSError, AnswerNotUnderstood) as error:
                load.failed(_reason(error))
                _close(selector, connection)
                _open(plan, selector, requests, load)


def _receive(connection: Connection) -> bytes:
    packet = connection.socket.recv(RECEIVE_BYTES)
    if not packet:
        raise ConnectionError
    return packet


def _open(
    plan: Plan, selector: selectors.BaseSelector, requests: Iterator[bytes], load: Load
) -> None:
    connection = Connection(plan)
    selector.register(connection.socket, selectors.EVENT_READ, connection)
    connection.sent = monotonic()
    try:
        connection.socket.sendall(next(requests))
    except OSError as error:  # the loop will find the connection closed, and open another
        load.failed(_reason(error))


def _close(selector: selectors.BaseSelector, connection: Connection) -> None:
    selector.unregister(connection.socket)
    connection.socket.close()


def _take_last_answers(selector: selectors.BaseSelector, load: Load) -> None:
    """A server that is left in the middle of an answer would count a client that went away."""
    until = monotonic() + LAST_ANSWERS_SECONDS
    while selector.get_map() and (left := until - monotonic()) > 0:
        for key, _ in selector.select(left):
            connection: Connection = key.data
            try:
                answer = connection.reader.feed(_receive(connection))
            except (OSError, AnswerNotUnderstood) as error:
                load.failed(_reason(error))
                _close(selector, connection)
                continue
            if answer is None:
                continue
            if is_ok(answer):
                now = monotonic()
                load.finished.append(now)
                load.seconds.append(now - connection.sent)
            else:
                load.failed(problem(answer))
            _close(selector, connection)
    for _ in list(selector.get_map()):
        load.failed(f"no answer came within {LAST_ANSWERS_SECONDS:.0f} seconds")


def _reason(error: Exception) -> str:
    if isinstance(error, AnswerNotUnderstood):
        return "an answer was not HTTP/1.1 with a Content-Length"
    return "the server closed the connection"
