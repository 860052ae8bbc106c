"""Parses HTTP/1.1 replies with llhttp (`httptools`), as the server parses requests. No sockets."""

from typing import NamedTuple

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

NOT_HTTP = (HttpParserError, HttpParserUpgrade)


class Reply(NamedTuple):
    status: int
    headers: dict[bytes, bytes]  # names in lower case
    body: bytes
    keep_alive: bool  # whether the connection may be used again

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("utf-8", "replace")


class ReplyReader:
    """Reads the replies of one connection, from pieces that may be cut anywhere."""

    def __init__(self) -> None:
        self._parser = HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._headers_are_complete = False
        self._reply: Reply | None = None

    def feed(self, data: bytes) -> Reply | None:
        """The reply, if this completes it. Raises one of NOT_HTTP."""
        self._parser.feed_data(data)
        reply, self._reply = self._reply, None
        return reply

    def end_of_stream(self) -> Reply | None:
        """The reply, if it is one whose body ends when the server closes the connection."""
        framed = {b"content-length", b"transfer-encoding"} & self._headers.keys()
        if not self._headers_are_complete or framed:
            return None
        return self._finish(keep_alive=False)

    # --- callbacks of the parser -------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._headers_are_complete = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        reply = self._finish(keep_alive=self._parser.should_keep_alive())
        if reply.status >= 200:  # a 1xx reply comes before the final one
            self._reply = reply

    def _finish(self, *, keep_alive: bool) -> Reply:
        status = self._parser.get_status_code()
        reply = Reply(status, self._headers, b"".join(self._body), keep_alive)
        self._headers, self._body, self._headers_are_complete = {}, [], False
        return reply
