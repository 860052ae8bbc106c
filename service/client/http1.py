"""Parses HTTP/1.1 replies with llhttp (`httptools`), as the server parses requests. No sockets."""

from typing import NamedTuple

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from service.client.errors import AnswerTooLarge

NOT_HTTP = (HttpParserError, HttpParserUpgrade)
HEAD_PIECE = 4096  # so exactly is a reply's head measured


class ReplyLimits(NamedTuple):
    """What a client reads of one reply before it gives up, in bytes as they are sent."""

    head_bytes: int = 65_536
    body_bytes: int = 256 * 2**20


DEFAULT_LIMITS = ReplyLimits()


class Reply(NamedTuple):
    status: int
    headers: dict[bytes, bytes]  # names in lower case
    body: bytes
    keep_alive: bool  # whether the connection may be used again

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("utf-8", "replace")


class ReplyReader:
    """Reads the replies of one connection, from pieces that may be cut anywhere."""

    def __init__(self, limits: ReplyLimits) -> None:
        self._limits = limits
        self._parser = HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._body = bytearray()
        self._headers_are_complete = False
        self._reply: Reply | None = None
        self._head_bytes = self._body_bytes = 0  # of the reply that is being read

    def feed(self, data: bytes) -> Reply | None:
        """The reply, if this completes it. Raises AnswerTooLarge or one of NOT_HTTP."""
        rest = memoryview(data)
        while rest and not self._headers_are_complete:
            piece, rest = rest[:HEAD_PIECE], rest[HEAD_PIECE:]
            self._parser.feed_data(piece)
            if self._reply is None:
                self._check_head(len(piece))
        if rest:
            self._check_body(len(rest))
            self._parser.feed_data(rest)
        reply, self._reply = self._reply, None
        if reply is not None:
            self._head_bytes = self._body_bytes = 0
        return reply

    def _check_head(self, more: int) -> None:
        """Replies with status 1xx count too, any number of which may come before the answer."""
        if self._headers_are_complete:
            self._check_body(0)
            return
        self._head_bytes += more
        if self._head_bytes > self._limits.head_bytes:
            raise AnswerTooLarge(
                f"The head of the answer has more than {self._limits.head_bytes} bytes: if the "
                "server is to be trusted, pass a larger max_head_bytes=."
            )

    def _check_body(self, more: int) -> None:
        """Before it is read: what the head says of its length, and what has come."""
        self._body_bytes += more
        said = self._headers.get(b"content-length", b"")
        length = max(int(said) if said.isdigit() else 0, self._body_bytes)
        if length > self._limits.body_bytes:
            raise AnswerTooLarge(
                f"The body of the answer has more than {self._limits.body_bytes} bytes: ask for "
                "fewer rows or a smaller k or, if the server is to be trusted, pass a larger "
                "max_body_bytes=."
            )

    def end_of_stream(self) -> Reply | None:
        """The reply, if it is one whose body ends when the server closes the connection."""
        framed = {b"content-length", b"transfer-encoding"} & self._headers.keys()
        if not self._headers_are_complete or framed:
            return None
        return self._finish(keep_alive=False)

    # --- callbacks of the parser -------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headers_are_complete:  # else it follows the body, and is nobody's business
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._headers_are_complete = True

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        reply = self._finish(keep_alive=self._parser.should_keep_alive())
        if reply.status >= 200:  # a 1xx reply comes before the final one
            self._reply = reply

    def _finish(self, *, keep_alive: bool) -> Reply:
        status = self._parser.get_status_code()
        reply = Reply(status, self._headers, bytes(self._body), keep_alive)
        self._headers, self._body, self._headers_are_complete = {}, bytearray(), False
        return reply
