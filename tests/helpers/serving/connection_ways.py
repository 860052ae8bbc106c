"""Servers in this process for tests of connections: both event loops, head cache on and off."""

import gc
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import trustme
from helpers.fake_engine import FakeEngine
from helpers.raw_http import Connection
from helpers.server import in_thread, wait_until
from helpers.tiny_bundle import WIDTH, write_tiny

from service.http.app import Application, create_app
from service.http.body import ByteBudget
from service.http.inference.connection.limits import LimitedConnection
from service.settings import EngineSettings, Settings


class Way(NamedTuple):
    loop: Literal["uvloop", "asyncio"]
    head_cache: bool


WAYS = [Way(loop, cached) for loop in ("uvloop", "asyncio") for cached in (True, False)]


@dataclass(frozen=True)
class Served:
    app: Application
    port: int
    fake: FakeEngine

    @property
    def budget(self) -> ByteBudget:
        found: ByteBudget = self.app.state.service.budget
        return found

    def connections(self) -> list[LimitedConnection]:
        """Those that are open."""
        made = [one for one in gc.get_objects() if type(one) is self.app.connection]
        return [one for one in made if one in one.connections]


@contextmanager
def served(
    folder: Path,
    way: Way,
    *,
    keep_alive: int = 75,
    tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
    **settings: object,
) -> Iterator[Served]:
    write_tiny(folder / "models" / "tiny" / "1", labels=False)
    made = Settings(
        models=folder / "models",
        head_cache=way.head_cache,
        engine=EngineSettings(stuck_seconds=60),
        **settings,
    )
    fake = FakeEngine(hidden_size=WIDTH, n_reachable=1000)
    app = create_app(made, engine_factory=lambda *_: fake)
    with in_thread(app, timeout_keep_alive=keep_alive, loop=way.loop, tls=tls) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200)
        client.close()
        try:
            yield Served(app, client.base_url.port or 0, fake)
        finally:
            fake.release.set()


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server and of a client that trusts it."""
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return server, client


def slow_socket(
    port: int, client: ssl.SSLContext | None = None, *, room: int | None = 65_536
) -> socket.socket:
    """Of a client whose kernel takes little that it has not read; None: as much as by default."""
    plain = socket.socket()
    if room is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    plain.settimeout(30)
    plain.connect(("127.0.0.1", port))
    return plain if client is None else client.wrap_socket(plain, server_hostname="127.0.0.1")


def teach(connection: Connection, asked: bytes, times: int = 3) -> None:
    """Asks until the request head is known and calls are known to be short."""
    for _ in range(times):
        connection.send(asked)
        assert connection.answer()[0] == 200
