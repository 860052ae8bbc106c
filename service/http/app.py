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

from service.bundle import snapshots
from service.bundle.snapshots import SharedSnapshots, Snapshot
from service.engine import Engine
from service.errors import DSSError
from service.http import openapi, problems
from service.http.auth.access import Access
from service.http.auth.tls import Tls
from service.http.inference import handler, request
from service.http.inference.handler import NativeHandler
from service.http.inference.protocol import InferenceProtocol, protocol
from service.http.inference.v2 import V2Handler
from service.http.middleware import cors
from service.http.middleware.authorize import Authorize
from service.http.middleware.browser import SecurityHeaders
from service.http.middleware.observe import ObserveRequests
from service.http.routes import docs, explorer, models, page
from service.http.state import AppState
from service.http.v2 import models as v2_models
from service.http.v2 import repository as v2_repository
from service.http.v2 import settings as v2_settings
from service.repository.catalog import Repository
from service.repository.desired_state import DesiredStateStore, LocalStateStore, SharedStateStore
from service.repository.loader import Loader
from service.repository.manager import ModelManager
from service.repository.model import EngineFactory, open_model
from service.settings import Settings
from service.shared_state import worker_table
from service.system import cpu_quota, file_watch
from service.telemetry import logging_setup
from service.telemetry.log_level import LogLevel
from service.telemetry.metrics.registry import Metrics
from service.telemetry.request_recorder import logging_and_tracing

logger = logging.getLogger(__name__)


class Application(FastAPI):
    """FastAPI, but for the hot paths, which never reach it."""

    topk: NativeHandler
    infer: V2Handler
    protocol: type[InferenceProtocol]  # for uvicorn's `http`
    tls: Tls | None
    log_level: LogLevel
    outermost: ASGIApp  # `answer`, or CORS around it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.outermost(scope, receive, send)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            place = handler.place(scope["path"])
            if place is not None:
                path = self.topk if place.native else self.infer
                await request.answer(path, place, scope, receive, send)
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
            Engine,
            backend=settings.engine.backend,
            cpus=cpu_quota.threads_per_worker(settings.workers),
        )
    repository = Repository(settings.default_model)
    keeper = _keeper(settings, metrics, repository, engine_factory, shared)
    access = Access(settings.access, metrics.denied, metrics.keys_reload_failed.set)
    journal = logging_and_tracing(settings)
    logging_setup.count_dropped(metrics.log_lines_dropped)
    state = AppState(settings, metrics, repository, keeper, access, journal)

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
    app.add_middleware(Authorize, access=access)
    app.add_middleware(SecurityHeaders)
    app.add_middleware(ObserveRequests, metrics=metrics, journal=journal)
    problems.add_handlers(app)
    app.topk, app.infer = NativeHandler(state), V2Handler(state)
    repository.on_switch += [app.topk.refresh, app.infer.refresh]
    app.protocol = protocol(app.topk, app.infer)
    models.add_routes(app, state)
    explorer.add_routes(app, state)
    v2_models.add_routes(app, state)
    v2_repository.add_routes(app, state)
    v2_settings.add_routes(app, state, app.log_level)
    docs.add_routes(app)
    page.add_routes(app)
    _document(app, state)
    return app


@asynccontextmanager
async def _lifespan(app: Application) -> AsyncIterator[None]:
    """Models are loaded beside the server, so that /livez answers from the first moment."""
    state: AppState = app.state.service
    keeping = asyncio.create_task(_keep(state))
    watching = asyncio.create_task(file_watch.every_second(app.refresh))
    noting = asyncio.create_task(file_watch.every_second(partial(_note_counts, state.metrics)))
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
) -> ModelManager:
    if shared is None:
        board: DesiredStateStore = LocalStateStore()
        snapshot: Snapshot = snapshots.private_copy
    else:
        board = SharedStateStore(shared, metrics.cells, partial(worker_table.read, shared))
        snapshot = SharedSnapshots(shared / "snapshots")
    opener = partial(
        open_model,
        settings=settings,
        metrics=metrics,
        engine_factory=engine_factory,
        snapshot=snapshot,
    )
    loader = Loader(opener, repository, metrics, settings.repository.keep_versions)
    return ModelManager(
        settings.models, repository, loader, board, metrics, settings.repository.poll_seconds
    )


async def _keep(state: AppState) -> None:
    try:
        await state.keeper.run()
    except DSSError as error:
        logger.error("%s", error)
        state.load_failed = True
    except Exception:
        logger.exception("Loading the models failed.")
        state.load_failed = True


def _document(app: FastAPI, state: AppState) -> None:
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
