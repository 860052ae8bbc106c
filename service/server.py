"""Runs the application under uvicorn, and stops it gently.

SIGTERM: /readyz fails while requests are still answered, so that load balancers notice; then no
connection is accepted, requests under way finish, and the process ends with status 0. SIGINT, from
someone at a terminal, skips the first step. A second signal ends everything at once.
"""

import asyncio
import contextlib
import math
import signal
from time import monotonic
from types import FrameType

import uvicorn

from service import logs
from service.app import Application, create_app
from service.errors import ModelsFolderMissing, NotStarted
from service.settings import Settings

TICK_SECONDS = 0.05
# Longer than the idle timeout of common load balancers, so that they close first.
KEEP_ALIVE_SECONDS = 75


def serve(settings: Settings) -> None:
    if not settings.models.is_dir():
        raise ModelsFolderMissing(f"There is no models folder {settings.models}.")
    logs.configure(settings)
    server = Server(create_app(settings), settings)
    with contextlib.suppress(SystemExit):  # how uvicorn ends when it cannot bind
        server.run()
    if not server.started:
        raise NotStarted(f"The server could not start on {settings.host}:{settings.port}.")


class Server(uvicorn.Server):
    def __init__(self, app: Application, settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                loop="uvloop",
                http=app.protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=settings.access_log,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=math.ceil(settings.stop_seconds),
            )
        )
        self._state = app.state.service
        self._drain_seconds = settings.drain_seconds
        self._serve_until = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own handler raises the signal again at the end; a clean stop is no failure.
        del frame
        if self.should_exit:
            self.force_exit = True
        elif sig == signal.SIGTERM:
            self._serve_until = monotonic() + self._drain_seconds
        self._state.draining = True
        self.should_exit = True

    async def main_loop(self) -> None:
        await super().main_loop()
        while monotonic() < self._serve_until and not self.force_exit:
            await asyncio.sleep(TICK_SECONDS)
