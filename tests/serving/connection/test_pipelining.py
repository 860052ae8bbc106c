"""Requests that are sent without waiting for answers: one at a time, and taking turns."""

import asyncio
import threading
from pathlib import Path

from helpers.raw_http import Connection, request
from helpers.server import wait_until
from helpers.serving.connection_ways import Served, Way, served, teach

from service.http.inference.connection.turns import Turns
from service.settings import Limits

PROBE = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
TINY = b"GET /livez HTTP/1.1\r\n\r\n"


def held_up(server: Served, connection: Connection) -> None:
    """The engine is busy with this connection's request."""
    server.fake.hold()
    connection.send(request(0, b'{"inputs": [[600, 0, 0, 0]], "k": 2}'))
    assert server.fake.entered.wait(30)


def test_all_are_answered_in_their_order(tmp_path: Path, way: Way) -> None:
    chunked = (
        b"POST /topk HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n24\r\n" + request(77)[-36:] + b"\r\n0\r\n\r\n"
    )
    with served(tmp_path, way) as server, Connection(server.port) as connection:
        teach(connection, request(1))
        one_round = (
            request(1) + PROBE + chunked + request(2, more="X: y\r\n") + b"\r\n" + request(3)
        )
        sending = threading.Thread(target=connection.send, args=(one_round * 200,))
        sending.start()
        for _ in range(200):
            assert connection.classes() == [[1]]
            assert connection.answer()[2] == b'{"status":"ok"}'
            assert [connection.classes() for _ in range(3)] == [[[77]], [[2]], [[3]]]
        sending.join()


def test_packets_may_end_anywhere(tmp_path: Path, way: Way) -> None:
    with served(tmp_path, way) as server:
        for cut in range(1, len(TINY) + 1):
            with Connection(server.port) as connection:
                connection.send((TINY * 3)[:cut])
                connection.send((TINY * 3)[cut:])
                assert [connection.answer()[0] for _ in range(3)] == [200] * 3


def test_what_is_behind_an_unanswered_request_is_not_parsed(tmp_path: Path, way: Way) -> None:
    with served(tmp_path, way) as server, Connection(server.port) as connection:
        held_up(server, connection)
        connection.send(TINY * 5000)
        (made,) = server.connections()
        wait_until(lambda: bool(made._waiting))
        assert not made.pipeline
        assert len(made.tasks) <= 1
        assert 0 < server.budget.taken <= len(TINY) * 5000
        server.fake.release.set()
        assert connection.classes() == [[600, 601]]
        assert all(connection.answer()[0] == 200 for _ in range(5000))
        assert server.budget.taken == 0


def test_what_waits_is_forgotten_with_its_connection(tmp_path: Path, way: Way) -> None:
    with served(tmp_path, way) as server:
        with Connection(server.port) as connection:
            held_up(server, connection)
            connection.send(TINY * 500)
            wait_until(lambda: server.budget.taken > 0)
        server.fake.release.set()
        wait_until(lambda: not server.connections())
        assert server.budget.taken == 0


def test_what_waits_takes_no_more_than_all_connections_may_hold(tmp_path: Path, way: Way) -> None:
    limits = Limits(max_pending_bytes=20_000)
    with served(tmp_path, way, limits=limits) as server, Connection(server.port) as connection:
        held_up(server, connection)
        connection.send(TINY * 2000)
        (made,) = server.connections()
        wait_until(lambda: made._closes)
        assert server.budget.taken == 0
        server.fake.release.set()
        status, headers, _ = connection.answer()
        assert (status, headers["connection"]) == (200, "close")


class Talkative:
    """A connection with several requests."""

    def __init__(self, name: str, turns: Turns, count: int, log: list[str]) -> None:
        self.loop = asyncio.get_running_loop()
        self.name, self.turns, self.count, self.log = name, turns, count, log

    def take_turn(self) -> None:
        self.log.append(self.name)
        self.count -= 1
        if self.count:
            self.turns.wait(self)


async def take_turns() -> str:
    turns, log = Turns(), list[str]()
    loop = asyncio.get_running_loop()
    for name in "abc":
        turns.wait(Talkative(name, turns, 3, log))

    def ordinary() -> None:
        log.append(".")
        if "".join(log).count("c") < 3:
            loop.call_soon(ordinary)

    loop.call_soon(ordinary)
    while "".join(log).count("c") < 3:
        await asyncio.sleep(0)
    return "".join(log).rstrip(".")


def test_connections_take_turns_and_so_does_everything_else() -> None:
    assert asyncio.run(take_turns()) == "a.b.c.a.b.c.a.b.c"
