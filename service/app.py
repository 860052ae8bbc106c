"""Wiring: settings in, an application out."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, ProcessCollector
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from service import (
    api,
    cors,
    cpus,
    docs_page,
    exchange,
    explore_api,
    explorer_page,
    hot,
    logs,
    openapi,
    problems,
    roster,
    snapshots,
    v2_models,
    v2_repository,
    v2_settings,
    watch,
)
from service.access import Access
from service.board import Board, PrivateBoard, SharedBoard
from service.bookkeeper import bookkeeper
from service.edge import Edge
from service.engine import Engine
from service.errors import DSSError
from service.gate import Gate
from service.hot import TopKPath
from service.keeper import Keeper
from service.log_level import LogLevel
from service.metrics import Metrics
from service.model import EngineFactory, open_model
from service.protocol import HotProtocol, protocol
from service.repository import Repository
from service.security_headers import SecurityHeaders
from service.settings import Settings
from service.snapshots import SharedSnapshots, Snapshot
from service.state import State
from service.tls import Tls
from service.v2 import InferPath
from service.versions import Loader

logger = logging.getLogger(__name__)


class Application(FastAPI):
    """FastAPI, but for the hot paths, which never reach it."""

    topk: TopKPath
    infer: InferPath
    protocol: type[HotProtocol]  # for uvicorn's `http`
    tls: Tls | None
    log_level: LogLevel
    outermost: ASGIApp  # `answer`, or CORS around it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.outermost(scope, receive, send)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            place = hot.place(scope["path"])
            if place is not None:
                path = self.topk if place.native else self.infer
                await exchange.answer(path, place, scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    async def refresh(self, *, now: bool = False) -> None:
        """Read keys and certificates again, if their files have changed or in any case."""
        self.log_level.follow()
        await self.state.service.access.refresh(now=now)
        if self.tls is not None:
            await self.tls.refresh(now=now)


def create_app(
    settings: Settings,
    registry: CollectorRegistry | None = None,
    engine_factory: EngineFactory | None = None,
    metrics: Metrics | None = None,
    shared: Path | None = None,
) -> Application:
    """`shared` is a folder that the workers of one server have in common."""
    if registry is None:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
    if metrics is None:
        metrics = Metrics(registry)
    if engine_factory is None:
        engine_factory = partial(
            Engine, backend=settings.engine.backend, cpus=cpus.share(settings.workers)
        )
    repository = Repository(settings.default_model)
    keeper = _keeper(settings, metrics, repository, engine_factory, shared)
    access = Access(settings.access, metrics.denied, metrics.keys_reload_failed.set)
    journal = bookkeeper(settings)
    logs.count_dropped(metrics.log_lines_dropped)
    state = State(settings, metrics, repository, keeper, access, journal)

    app = Application(
        title="Doubly sparse softmax",
        version=version("doubly-sparse-softmax"),
        lifespan=_lifespan,
        redirect_slashes=False,
        redoc_url=None,
        docs_url=None,
        swagger_ui_oauth2_redirect_url=None,
        # It would trace its own routes beside us; the journal traces all of them.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.service = state
    app.log_level = LogLevel(metrics.cells)
    app.tls = Tls(settings.tls, metrics.tls_reload_failed.set) if settings.tls.cert else None
    crossing = cors.options(settings.cors)
    app.outermost = app.answer if crossing is None else CORSMiddleware(app.answer, **crossing)
    app.add_middleware(Gate, access=access)
    app.add_middleware(SecurityHeaders)
    app.add_middleware(Edge, metrics=metrics, journal=journal)
    problems.add_handlers(app)
    app.topk, app.infer = TopKPath(state), InferPath(state)
    repository.on_switch += [app.topk.refresh, app.infer.refresh]
    app.protocol = protocol(app.topk, app.infer)
    api.add_routes(app, state)
    explore_api.add_routes(app, state)
    v2_models.add_routes(app, state)
    v2_repository.add_routes(app, state)
    v2_settings.add_routes(app, state, app.log_level)
    docs_page.add_routes(app)
    explorer_page.add_routes(app)
    _document(app, state)
    return app


@asynccontextmanager
async def _lifespan(app: Application) -> AsyncIterator[None]:
    """Models are loaded beside the server, so that /livez answers from the first moment."""
    state: State = app.state.service
    keeping = asyncio.create_task(_keep(state))
    watching = asyncio.create_task(watch.forever(app.refresh))
    noting = asyncio.create_task(watch.forever(partial(_note_counts, state.metrics)))
    yield
    watching.cancel()
    noting.cancel()
    state.draining = True
    state.keeper.stop()
    await keeping
    await state.keeper.close()
    await asyncio.to_thread(state.journal.close)


async def _note_counts(metrics: Metrics) -> None:
    metrics.look(monotonic())


def _keeper(
    settings: Settings,
    metrics: Metrics,
    repository: Repository,
    engine_factory: EngineFactory,
    shared: Path | None,
) -> Keeper:
    if shared is None:
        board: Board = PrivateBoard()
        snapshot: Snapshot = snapshots.private
    else:
        board = SharedBoard(shared, metrics.cells, partial(roster.read, shared))
        snapshot = SharedSnapshots(shared / "snapshots")
    opener = partial(
        open_model,
        settings=settings,
        metrics=metrics,
        engine_factory=engine_factory,
        snapshot=snapshot,
    )
    loader = Loader(opener, repository, metrics, settings.repository.keep_versions)
    return Keeper(
        settings.models, repository, loader, board, metrics, settings.repository.poll_seconds
    )


async def _keep(state: State) -> None:
    try:
        await state.keeper.run()
    except DSSError as error:
        logger.error("%s", error)
        state.load_failed = True
    except Exception:
        logger.exception("Loading the models failed.")
        state.load_failed = True


def _document(app: FastAPI, state: State) -> None:
    """/openapi.json is built when first asked for, with an example from the default model."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            if not state.repository.loaded:
                return openapi.build(app, None)
            try:
                shown = openapi.example(state.repository.get())
            except Exception:
                logger.warning("The API is documented without an example.", exc_info=True)
                return openapi.build(app, None)
            app.openapi_schema = openapi.build(app, shown)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
