"""Clients that end half of a connection, send empty lines, or bytes that no header may have."""

import socket
from pathlib import Path

import pytest
from helpers.raw_http import Connection, request
from helpers.server import wait_until
from helpers.serving.connection_ways import Way, served, teach


def end_sending(connection: Connection) -> None:
    connection._raw.socket.shutdown(socket.SHUT_WR)


def test_a_client_that_has_ended_its_side_is_answered(tmp_path: Path, way: Way) -> None:
    with served(tmp_path, way) as server:
        for _ in range(3):  # known after the first time
            with Connection(server.port) as connection:
                connection.send(request(5))
                end_sending(connection)
                assert connection.classes() == [[5]]
                assert connection.ended()


def test_so_it_is_while_its_answer_is_computed(
    tmp_path: Path, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "service.http.inference.connection.sequential"
    monkeypatch.setattr(f"{module}.HALF_CLOSED_SECONDS", 60.0)
    with served(tmp_path, way) as server, Connection(server.port) as connection:
        server.fake.hold()
        connection.send(request(5))
        assert server.fake.entered.wait(30)
        end_sending(connection)
        (made,) = server.connections()
        wait_until(lambda: made._closes)
        server.fake.release.set()
        status, headers, _ = connection.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert connection.ended()


def test_so_it_is_with_several_requests(tmp_path: Path, way: Way) -> None:
    with served(tmp_path, way) as server, Connection(server.port) as connection:
        connection.send(b"".join(request(value) for value in range(20)))
        end_sending(connection)
        assert [connection.classes() for _ in range(20)] == [[[value]] for value in range(20)]
        assert connection.ended()


def test_half_a_request_is_not_waited_for(tmp_path: Path, way: Way) -> None:
    with served(tmp_path, way) as server, Connection(server.port) as connection:
        connection.send(request(5)[:-5])
        end_sending(connection)
        assert connection.ended()


@pytest.mark.parametrize("stray", [b"\r\n", b"\n", b"\r\n\r\n"])
def test_empty_lines_do_not_keep_a_connection_open(tmp_path: Path, way: Way, stray: bytes) -> None:
    with (
        served(tmp_path, way, keep_alive=1) as server,
        Connection(server.port) as connection,
    ):
        teach(connection, request(1))
        connection.send(stray)
        assert connection.ended()
        assert not server.connections()


def test_empty_lines_before_a_request_are_no_part_of_it(tmp_path: Path, way: Way) -> None:
    with served(tmp_path, way) as server, Connection(server.port) as connection:
        for value in range(4):
            connection.send(b"\r\n" + request(value))
            assert connection.classes() == [[value]]
            connection.send(b"\r\n")


@pytest.mark.parametrize("name", ["X-Request-ID", "traceparent", "X-Other"])
def test_a_byte_that_no_header_may_have_is_400(tmp_path: Path, way: Way, name: str) -> None:
    with served(tmp_path, way) as server:
        for forbidden in "\x00\x01\x1f\x7f\r\n":
            with Connection(server.port) as connection:
                teach(connection, request(1))
                connection.send(request(1, more=f"{name}: a{forbidden}b\r\n"))
                assert connection.answer()[0] == 400, repr(forbidden)
                assert connection.ended()


def test_space_around_a_request_id_is_no_part_of_it(tmp_path: Path, way: Way) -> None:
    with served(tmp_path, way) as server, Connection(server.port) as connection:
        for written in ["mine", "  mine", "mine  ", "\tmine \t"] * 2:
            connection.send(request(1, more=f"X-Request-ID:{written}\r\n"))
            assert connection.answer()[1]["x-request-id"] == "mine"


def test_a_trailer_is_no_header(tmp_path: Path, way: Way) -> None:
    body = request(4)[-36:]
    sent = (
        b"POST /topk HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n24\r\n" + body + b"\r\n0\r\nX-Request-ID: late\r\n\r\n"
    )
    with served(tmp_path, way) as server, Connection(server.port) as connection:
        connection.send(sent)
        status, headers, _ = connection.answer()
        assert (status, headers["x-request-id"] != "late") == (200, True)
        connection.send(request(2))
        assert connection.classes() == [[2]]
