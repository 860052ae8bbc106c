"""A client that decides what goes into a packet."""

import orjson

from service.bench.http_reader import RawConnection

ANSWER_SECONDS = 30.0


class Connection:
    """A client that decides what goes into a packet."""

    def __init__(self, port: int) -> None:
        self._raw = RawConnection(port, ANSWER_SECONDS)

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def send(self, data: bytes) -> None:
        self._raw.socket.sendall(data)  # fails if the server has ended the connection

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers in lower case, body."""
        answer = self._raw.answer()
        return answer.status, answer.headers, answer.body

    def classes(self) -> list[list[int]]:
        status, _, body = self.answer()
        assert status == 200, body
        found: list[list[int]] = orjson.loads(body)["classes"]
        return found

    def read_packet(self) -> bytes:
        packet = self._raw.socket.recv(65_536)
        assert packet, "the server closed the connection"
        return packet

    def ended(self) -> bool:
        return self._raw.socket.recv(1) == b""


def request(value: int, body: bytes | None = None, more: str = "", version: str = "1.1") -> bytes:
    """A request for the class `value`, always equally long."""
    if body is None:
        body = b'{"inputs": [[%3d, 0, 0, 0]], "k": 1}' % value
    head = f"POST /topk HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n{more}"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
