"""Requests gone wrong, from a seed: case N of a seed is always the same bytes.

Bodies of all four kinds are bent bit by bit and field by field; heads are bent, cut, doubled, sent
in chunks that lie, and one after the other without waiting.
"""

import json
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.chaos.harness import known_requests
from benchmarks.chaos.harness.answer_check import END
from benchmarks.chaos.harness.known_requests import KINDS

TOKENS = (
    b"NaN", b"-Infinity", b"1e999", b"1e-999", b"-0", b"null", b"true", b"[]", b"{}", b'"', b",",
    b"\\u0000", b"\\ud800", b"\x00", b"\xff\xfe", b"\xc0\xae", b"[" * 300, b'{"a":' * 200,
    b"9" * 400, b"\r\n\r\n",
)  # fmt: skip
NUMBERS = (0, -1, 1, 2, 5, 8, 9, 1000, 1001, 2**31, 2**63, 2**64, -(2**63), 10**30, 1.5, 1e308)
ODD: tuple[object, ...] = (*NUMBERS, True, None, "5", "", [], {}, [5], "NaN", "\u202e", "\x00")
CONTENT_TYPES = (
    "application/json", "application/json; charset=utf-16", "application/x-npy", "text/plain", "",
    "application/octet-stream", "APPLICATION/JSON", ";;;", "multipart/form-data; boundary=a",
)  # fmt: skip
ACCEPTS = (
    "*/*", "application/json", "application/x-npy", "application/*;q=0.5", "text/html", "*/*;q=nan",
    ",,,", "application/json;q=0,application/x-npy;q=1", "q=1", "a" * 500,
)  # fmt: skip
OTHER_HEADERS = {
    "Content-Encoding": ("gzip", "identity", "", "br, gzip"),
    "DSS-Timeout": ("5", "1e3", "-1", "nan", "inf", "x", "9" * 300, "1_0", "\u0665"),
    "X-Request-Id": ("abc", "a" * 5000, "\x01", "a b", "\u202e"),
    "Traceparent": ("00-" + "0" * 32 + "-" + "1" * 16 + "-01", "ff", "00-zz"),
    "Authorization": ("Bearer x", "Bearer", "Basic !!!", "Bearer " + "a" * 4000),
    "Inference-Header-Content-Length": ("0", "-1", "1", "99999999999999999999", "x", "10"),
    "Expect": ("100-continue", "200-ok"),
    "Connection": ("close", "keep-alive", "upgrade", "close, close"),
    "Upgrade": ("h2c", "websocket", "TLS/1.0"),
    "Host": ("", "a" * 300, "\u00e9", "a:b:c"),
    "Cookie": ("a=b; " * 100,),
    "Range": ("bytes=0-1",),
}
LENGTHS = ("-1", "+5", "0x5", "5, 5", "", "1e3", "9" * 25, "1000000000", " 5 5", "\u0665")
METHODS = (
    "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "BREW", "get", "",
)  # fmt: skip
PATHS = (
    "/", "/models", "/metrics", "/openapi.json", "/docs", "/v2", "/livez", "/readyz", "/startupz",
    "/models/../../etc/passwd", "/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd/topk", "//etc/passwd",
    "/%00", "/models/m%00/topk", "/models/%c0%ae%c0%ae/topk", "/models/..%5c..%5cetc/topk",
    "/v2/models//infer", "/models/m/versions/1%0a/topk", "/models/m/versions/-1/topk",
    "/models/m/versions/1e9/topk", "/models/m/versions/" + "9" * 4000 + "/topk",
    "/models/m/versions/\uff11/topk", "/topk?k=%ff&k=1", "/topk/", "/TOPK", "http://elsewhere/topk",
    "*", "/" + "a" * 9000, "/?" + "&" * 5000, "/%", "/%zz", "/v2/models/m/versions/stable/infer",
    "/v2/repository/index", "/models/m/experts",
)  # fmt: skip
GARBAGE = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
    b"\r\n" * 5000,
    b"GET / HTTP/1.1\r\nA: " + b"b" * 200_000 + END,
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
    b"GET /\r\n",
    b" " * 9000,
)


@dataclass(frozen=True)
class Case:
    """What is sent, and what is owed."""

    label: str
    data: bytes
    owed: int | None  # answers; None: the server may as well end the connection
    kind: str = ""  # of the body that is asked about, if its answer can be foreseen
    path: str = ""
    headers: dict[str, str] | None = None
    body: bytes = b""


@dataclass(frozen=True)
class Maker:
    """Cases about a model's width."""

    seed: int
    width: int
    model: str = "m"

    def case(self, number: int) -> Case:
        rng = random.Random(f"{self.seed}/{number}")  # noqa: S311
        maker = rng.choices(
            (self._body, self._fields, self._headers, self._heads, self._chunks, self._pipeline),
            (30, 25, 15, 15, 8, 7),
        )[0]
        return maker(rng)

    # --- bodies ------------------------------------------------------------------------------

    def _valid(
        self, rng: random.Random, kind: str | None = None
    ) -> tuple[str, bytes, str, dict[str, str]]:
        kind = kind or rng.choice(KINDS)
        values = np.random.default_rng(rng.getrandbits(32))
        hidden = values.normal(size=(rng.choice((1, 1, 2, 7)), self.width)).astype(np.float32)
        model = None if kind in ("json", "npy") and rng.random() < 0.3 else self.model
        k, experts = rng.choice((1, 3, 5)), rng.choice((1, 1, 2))
        return kind, *known_requests.content(kind, hidden, k, model, experts)

    def _body(self, rng: random.Random) -> Case:
        """A body with some of its bytes changed."""
        kind, body, path, headers = self._valid(rng)
        for _ in range(rng.choice((1, 1, 2, 5))):
            body = rng.choice(BENDERS)(rng, body)
        return _asked("bytes", kind, body, path, headers)

    def _fields(self, rng: random.Random) -> Case:
        """A body that is well formed but asks for something odd."""
        kind, body, path, headers = self._valid(rng)
        if kind == "npy":
            body, path = self._odd_npy(rng, body, path)
        else:
            ends = int(headers.get("Inference-Header-Content-Length", len(body)))
            document = json.loads(body[:ends])
            for _ in range(rng.choice((1, 1, 2))):
                _put_odd(rng, document)
            head = json.dumps(document).encode()
            body = head + body[ends:]
            if kind == "v2-binary" and rng.random() < 0.8:
                headers["Inference-Header-Content-Length"] = str(len(head))
        return _asked("fields", kind, body, path, headers)

    def _odd_npy(self, rng: random.Random, body: bytes, path: str) -> tuple[bytes, str]:
        if rng.random() < 0.5:
            shape: Any = rng.choice(
                [(0, self.width), (2**40, 2**40), (1,), (1, self.width, 1), (True, 4), (-1, 4), ()]
            )
            descr = rng.choice(("<f4", ">f4", "<f8", "<f2", "|O", "<i4", "|V8", "<f16", "<c8", "x"))
            header = repr({"descr": descr, "fortran_order": rng.random() < 0.2, "shape": shape})
            text = header.encode() + b"\n"
            return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body[128:], path
        name = rng.choice(("k", "experts", "other", "%00", "k&k"))
        value = rng.choice((*map(str, NUMBERS), "", "%31", "٣", "1" * 5000, "1&k=1", "true"))
        return body, f"{path.partition('?')[0]}?{name}={_ascii(value)}"

    # --- heads -------------------------------------------------------------------------------

    def _headers(self, rng: random.Random) -> Case:
        """A good body under odd headers."""
        kind, body, path, headers = self._valid(rng)
        if rng.random() < 0.3:
            headers["Content-Type"] = rng.choice(CONTENT_TYPES)
        if rng.random() < 0.3:
            headers["Accept"] = rng.choice(ACCEPTS)
        for name in rng.sample(sorted(OTHER_HEADERS), rng.choice((1, 1, 3))):
            headers[name] = rng.choice(OTHER_HEADERS[name])
        if rng.random() < 0.1:
            headers |= {f"X-{number}": "a" for number in range(rng.choice((50, 99, 150, 2000)))}
        data = _request(path, body, headers)
        plain = all(ord(char) > 31 for value in headers.values() for char in value)
        large = len(data) - len(body) > 8000
        owed = 1 if plain and not large and "Upgrade" not in headers else None
        return Case("headers", data, owed, kind, path, headers, body)

    def _heads(self, rng: random.Random) -> Case:
        """A head that is no head."""
        _, body, path, headers = self._valid(rng)
        good = _request(path, body, headers)
        head, _, _ = good.partition(END)
        lines = head.split(b"\r\n")
        way = rng.randrange(8)
        if way == 0:
            for _ in range(rng.choice((1, 2, 5))):
                head = rng.choice(BENDERS)(rng, head)
            data = head + END + body
        elif way == 1:
            lines[0] = f"{rng.choice(METHODS)} {_ascii(rng.choice(PATHS))} HTTP/1.1".encode()
            data = b"\r\n".join(lines) + END + body
        elif way == 2:
            version = rng.choice(
                ("HTTP/0.9", "HTTP/1.0", "HTTP/2.0", "HTTP/1.1.1", "", "ICY", "http/1.1")
            )
            lines[0] = f"POST {path} {version}".encode()
            data = b"\r\n".join(lines) + END + body
        elif way == 3:
            lines = [line for line in lines if not line.startswith(b"Content-Length")]
            lines += [
                f"Content-Length: {rng.choice(LENGTHS)}".encode() for _ in range(rng.choice((1, 2)))
            ]
            data = b"\r\n".join(lines) + END + body
        elif way == 4:
            data = good[: rng.randrange(len(good))]
        elif way == 5:
            data = good.replace(b"\r\n", rng.choice((b"\n", b"\r", b"\n\r")))
        elif way == 6:
            data = rng.randbytes(rng.choice((1, 10, 1000, 70_000)))
        else:
            data = rng.choice(GARBAGE)
        return Case("heads", data, None)

    def _chunks(self, rng: random.Random) -> Case:
        """A body in chunks, some of which lie."""
        kind, body, path, headers = self._valid(rng)
        cut = rng.randrange(1, max(2, len(body)))
        pieces = [body[:cut], body[cut:]]
        good = b"".join(_chunk(piece) for piece in pieces if piece) + b"0\r\n\r\n"
        way = rng.randrange(7)
        headers = headers | {"Transfer-Encoding": "chunked"}
        if way == 0:
            data = _head(path, headers) + good
            return Case("chunks", data, 1, kind, path, headers, body)
        if way == 1:
            headers["Content-Length"] = rng.choice((str(len(body)), "5", "0"))
            content = good
        elif way == 2:
            size = rng.choice(("fffffffffffffffff", "-1", "0x5", "g", "", " 5", "5;" + "a" * 9000))
            content = size.encode() + b"\r\n" + body + b"\r\n0\r\n\r\n"
        elif way == 3:
            content = good[: rng.randrange(len(good))]
        elif way == 4:
            content = good[:-2] + b"X-Trailer: " + b"a" * rng.choice((5, 100_000)) + b"\r\n\r\n"
        elif way == 5:
            headers["Transfer-Encoding"] = rng.choice(
                ("gzip, chunked", "chunked, chunked", "identity", "xchunked", "chunked\t", "")
            )
            content = good
        else:
            content = b"".join(_chunk(body[i : i + 1]) for i in range(len(body))) + b"0\r\n\r\n"
        return Case("chunks", _head(path, headers) + content, None)

    def _pipeline(self, rng: random.Random) -> Case:
        """Good requests without waiting for answers."""
        kind, body, path, headers = self._valid(rng)
        times = rng.choice((2, 3, 8))
        return Case(
            "pipeline", _request(path, body, headers) * times, times, kind, path, headers, body
        )


def _asked(label: str, kind: str, body: bytes, path: str, headers: dict[str, str]) -> Case:
    return Case(label, _request(path, body, headers), 1, kind, path, headers, body)


def _request(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    return _head(path, {"Content-Length": str(len(body))} | headers) + body


def _head(path: str, headers: dict[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in ({"Host": "chaos"} | headers).items()]
    return "\r\n".join(lines).encode() + END


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def _ascii(text: str) -> str:
    """As a careless client sends it: UTF-8 bytes in a request line, spaces taken out."""
    return text.replace(" ", "")


# --- what can happen to bytes ----------------------------------------------------------------

Bender = Callable[[random.Random, bytes], bytes]


def _flip(rng: random.Random, data: bytes) -> bytes:
    if not data:
        return b"\x00"
    bent = bytearray(data)
    bent[rng.randrange(len(bent))] ^= 1 << rng.randrange(8)
    return bytes(bent)


def _overwrite(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + rng.randbytes(rng.choice((1, 2, 8))) + data[start + 8 :]


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _drop(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.choice((1, 2, 16, 200)) :]


def _insert(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + rng.choice(TOKENS) + data[start:]


def _repeat(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data + data[start:] * rng.choice((1, 2, 10))


BENDERS: Sequence[Bender] = (_flip, _flip, _overwrite, _cut, _drop, _insert, _insert, _repeat)


def _put_odd(rng: random.Random, document: dict[str, Any]) -> None:
    """Change, add or take away one field of some object within."""
    within: list[Any] = [document]
    for found in within:  # grows while it is walked
        inner = found.values() if isinstance(found, dict) else found[:3]
        within += [one for one in inner if isinstance(one, dict | list)]
    chosen = rng.choice(within)
    odd = deepcopy(rng.choice(ODD))
    if isinstance(chosen, dict):
        names = [
            *chosen,
            "k",
            "experts",
            "inputs",
            "data",
            "shape",
            "parameters",
            "outputs",
            "id",
            "timeout",
        ]
        name = rng.choice(names)
        if rng.random() < 0.2:
            chosen.pop(name, None)
        else:
            chosen[name] = odd
    elif chosen and rng.random() < 0.7:
        chosen[rng.randrange(len(chosen))] = odd
    else:
        chosen.append(odd)
