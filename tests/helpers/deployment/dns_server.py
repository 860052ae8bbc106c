"""A name server on this host which, as Docker's, has the addresses of all containers of a name."""

import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

HEADER = struct.Struct("!6H")
RECORD = struct.Struct("!HHHIH")
A, IN = 1, 1
ANSWERED, NO_SUCH_NAME = 0x8580, 0x8583
QUESTION_AGAIN = 0xC00C  # a pointer to the name that was asked


@contextmanager
def named(names: Mapping[str, Sequence[str]], host: str, port: int = 0) -> Iterator[int]:
    """Answers from `names` as they are when they are asked for; yields its port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((host, port))
        thread = threading.Thread(target=_serve, args=(server, names))
        thread.start()
        address = server.getsockname()
        try:
            yield address[1]
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
                last.sendto(b"", address)
            thread.join()


def _serve(server: socket.socket, names: Mapping[str, Sequence[str]]) -> None:
    while (received := server.recvfrom(4096))[0]:
        query, client = received
        server.sendto(_answer(query, names), client)


def _answer(query: bytes, names: Mapping[str, Sequence[str]]) -> bytes:
    labels, at = [], HEADER.size
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode().lower())
        at += 1 + length
    name, question = ".".join(labels), query[HEADER.size : at + 5]
    asked, _ = struct.unpack("!2H", query[at + 1 : at + 5])
    addresses = names.get(name, ()) if asked == A else ()
    (identity,) = struct.unpack("!H", query[:2])
    status = ANSWERED if names.get(name) else NO_SUCH_NAME
    records = [
        RECORD.pack(QUESTION_AGAIN, A, IN, 1, 4) + socket.inet_aton(address)
        for address in addresses
    ]
    return HEADER.pack(identity, status, 1, len(records), 0, 0) + question + b"".join(records)
