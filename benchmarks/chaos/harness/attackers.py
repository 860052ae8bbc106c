"""Attackers in a process of their own, so that their work is not the server's.

Each connection is a closed loop: it connects, sends bytes that were made beforehand, waits for the
answer or for its end, closes, pauses and begins again. So an attack costs its attackers little, and
a server that answers sooner is not asked more than `1 / pause` times a second by a connection.

They come from an address of their own, by which the server's connections to them are known.
"""

import multiprocessing
import select
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from benchmarks.chaos.harness.load import JOIN_SECONDS, client_context
from service.bench.http_reader import (
    END_OF_HEAD,
    HOST,
    LENGTH,
    STATUS,
    STATUS_LINE,
    WITHOUT_BODY,
)

SOURCE = "127.0.0.2"
SOURCE_HEX = "0200007F"  # the same in /proc/net/tcp
RECEIVE_BYTES = 2**20
STATUS_BYTES = 12  # of "HTTP/1.1 200"
TICK_SECONDS = 0.05
LAST_CHUNK = b"0\r\n\r\n"
STOP, SENT = range(2)  # what both processes see
GONE = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP
WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(frozen=True)
class Attack:
    name: str
    request: bytes
    # one answer; all until the server ends the connection; or the status of an answer and no more
    reads: Literal["answer", "all", "status"] = "answer"
    piece: int | None = None  # bytes that are sent at once; the next ones a tick later
    pause: float = 0.25
    patience: float = 60.0  # then it leaves, with or without an answer
    connections: tuple[int, ...] = (1, 4, 15, 60)


@dataclass
class AttackOutcome:
    """What attackers saw."""

    sent: int = 0
    got: Counter[str] = field(default_factory=Counter)  # statuses, and ends without one
    # Answers with status 200 that they left unread: on which local port, since when.
    unread: list[tuple[int, float]] = field(default_factory=list)
    cpu_seconds: float = 0.0


class Running:
    def __init__(self, shared: Any, results: Any, process: Any) -> None:  # noqa: ANN401
        self._shared, self._results, self._process = shared, results, process

    def wait_until_sent(self, seconds: float = 10.0) -> None:
        deadline = monotonic() + seconds
        while not self._shared[SENT] and monotonic() < deadline:
            time.sleep(0.002)

    def finish(self) -> AttackOutcome:
        """All leave at once, whatever they still wait for."""
        self._shared[STOP] = 1
        attacked: AttackOutcome = self._results.recv()
        self._process.join(JOIN_SECONDS)
        return attacked


@contextmanager
def attacking(
    attack: Attack, port: int, connections: int, ca: Path | None = None
) -> Iterator[Running]:
    """Over TLS if the server's authority is given."""
    context = multiprocessing.get_context("spawn")
    shared = RawArray("q", 2)
    results, theirs = context.Pipe(duplex=False)
    arguments = (attack, port, connections, ca, shared, theirs)
    process = context.Process(target=_main, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        yield Running(shared, results, process)
    finally:
        if process.is_alive():
            process.kill()
        process.join()


def _main(
    attack: Attack,
    port: int,
    connections: int,
    ca: Path | None,
    shared: Any,  # noqa: ANN401
    results: Any,  # noqa: ANN401
) -> None:
    results.send(Attackers(attack, port, connections, ca, shared).run())
    results.close()


class Connection:
    __slots__ = (
        "allowed", "asked", "body_left", "events", "head", "opened", "secured", "socket", "unsent",
    )  # fmt: skip

    def __init__(self, made: socket.socket, request: bytes) -> None:
        self.socket = made
        self.opened = monotonic()
        self.secured = not isinstance(made, ssl.SSLSocket)
        self.unsent = memoryview(request)
        self.allowed = len(request)  # bytes to be sent now
        self.events = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP
        self.asked = False  # some bytes were sent
        self.head = b""  # of the answer, as far as it came
        self.body_left: int | None = None


class Attackers:
    def __init__(
        self,
        attack: Attack,
        port: int,
        connections: int,
        ca: Path | None,
        shared: Any,  # noqa: ANN401
    ) -> None:
        self._attack, self._port, self._shared = attack, port, shared
        self._tls = client_context(ca) if ca else None
        self._epoll = select.epoll()
        self._open: dict[int, Connection] = {}
        self._due = [monotonic()] * connections  # when each that is closed connects again
        self.outcome = AttackOutcome()

    def run(self) -> AttackOutcome:
        cpu, tick = time.process_time(), 0.0
        while not self._shared[STOP]:
            now = monotonic()
            while self._due and self._due[0] <= now:
                self._due.pop(0)
                self._connect()
            for descriptor, events in self._epoll.poll(TICK_SECONDS):
                connection = self._open.get(descriptor)
                if connection is not None:
                    self._go_on(connection, events)
            if monotonic() >= tick:
                tick = monotonic() + TICK_SECONDS
                self._look_at_all()
        for connection in self._open.values():
            connection.socket.close()
        self.outcome.cpu_seconds = time.process_time() - cpu
        return self.outcome

    def _look_at_all(self) -> None:
        for connection in list(self._open.values()):
            if monotonic() - connection.opened > self._attack.patience:
                self._end(connection, "left")
            elif self._attack.piece and connection.unsent:
                connection.allowed = self._attack.piece
                self._go_on(connection, 0)

    def _connect(self) -> None:
        made = socket.socket()
        try:
            made.bind((SOURCE, 0))
            made.settimeout(self._attack.patience)
            made.connect((HOST, self._port))
            made.setblocking(False)
            if self._tls is not None:
                made = self._tls.wrap_socket(
                    made, server_hostname=HOST, do_handshake_on_connect=False
                )
        except OSError:
            made.close()
            self._again("no connection")
            return
        connection = Connection(made, self._attack.request)
        connection.allowed = self._attack.piece or connection.allowed
        self._open[made.fileno()] = connection
        self._epoll.register(made, connection.events)

    def _go_on(self, connection: Connection, events: int) -> None:
        try:
            if not connection.secured:
                connection.socket.do_handshake()  # type: ignore[attr-defined]
                connection.secured = True
            self._send(connection)
            if not self._is_left_unread(connection):
                self._read(connection)
            elif events & GONE:
                self._end(connection, "cut off")
        except WOULD_BLOCK:
            self._wait_for(connection)
        except OSError:
            self._end(connection, "closed")

    def _wait_for(self, connection: Connection) -> None:
        """To be readable, and while there is more to send to be writable."""
        sends = connection.secured and connection.unsent and not self._attack.piece
        events = select.EPOLLIN | select.EPOLLRDHUP | (select.EPOLLOUT if sends else 0)
        if events != connection.events:
            connection.events = events
            self._epoll.modify(connection.socket, events)

    def _send(self, connection: Connection) -> None:
        """As much as the server takes."""
        with suppress(*WOULD_BLOCK):
            while connection.unsent and connection.allowed:
                sent = connection.socket.send(connection.unsent[: connection.allowed])
                connection.unsent = connection.unsent[sent:]
                connection.allowed -= sent if self._attack.piece else 0
                if not connection.asked:
                    connection.asked = True
                    self.outcome.sent += 1
                    self._shared[SENT] += 1

    def _read(self, connection: Connection) -> None:
        """Until the connection has no more, which is an exception."""
        attack, most = self._attack, RECEIVE_BYTES
        if attack.reads == "status":
            most = STATUS_BYTES
        while True:
            packet = connection.socket.recv(most)
            if not packet:
                self._end(connection, "closed")
                return
            if attack.reads == "all":
                self.outcome.got.update(status.decode() for status in STATUS_LINE.findall(packet))
            elif attack.reads == "status":
                self._leave_unread(connection, packet)
                return
            elif self._has_answer(connection, packet):
                self._end(connection, connection.head[STATUS].decode("latin-1"))
                return

    def _leave_unread(self, connection: Connection, packet: bytes) -> None:
        connection.head += packet
        status = connection.head[STATUS].decode("latin-1")
        if status != "200":
            self._end(connection, status)
            return
        self.outcome.got[status] += 1
        self.outcome.unread.append((connection.socket.getsockname()[1], monotonic()))
        self._epoll.modify(connection.socket, select.EPOLLRDHUP)

    def _is_left_unread(self, connection: Connection) -> bool:
        return self._attack.reads == "status" and bool(connection.head)

    def _has_answer(self, connection: Connection, packet: bytes) -> bool:
        """Whether the answer is complete."""
        if connection.body_left is None:
            connection.head += packet
            head, found, body = connection.head.partition(END_OF_HEAD)
            if not found:
                return False
            length = LENGTH.search(head)
            if connection.head[STATUS] in WITHOUT_BODY:
                connection.body_left = 0
            elif length is None:  # in chunks
                return body.endswith(LAST_CHUNK)
            else:
                connection.body_left = int(length[1])
            packet = body
        connection.body_left -= len(packet)
        return connection.body_left <= 0

    def _end(self, connection: Connection, how: str) -> None:
        self._open.pop(connection.socket.fileno(), None)
        connection.socket.close()  # which also takes it out of the epoll
        self._again(how)

    def _again(self, how: str) -> None:
        self.outcome.got[how] += 1
        self._due.append(monotonic() + self._attack.pause)
