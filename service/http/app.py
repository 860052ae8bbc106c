"""Wiring: settings in, an application out."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
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
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.batching.threads import EngineThreads
from service.bundle import snapshots
from service.bundle.snapshots import SharedSnapshots, Snapshot
from service.engine import Engine
from service.errors import DSSError
from service.http import openapi, problems, query, schemas
from service.http.auth.access import Access
from service.http.auth.tls import Tls
from service.http.inference import asgi, routes
from service.http.inference.connection.fast_answers import connection_class
from service.http.inference.handler import InferenceHandler
from service.http.inference.native import NativeHandler
from service.http.inference.routes import Protocol
from service.http.inference.v2 import V2Handler
from service.http.middleware.authorize import Authorize
from service.http.middleware.browser import SecurityHeaders, cors_options
from service.http.middleware.observe import ObserveRequests
from service.http.routes import docs, explorer, models, operations, page, topk
from service.http.state import AppState
from service.http.v2 import infer as v2_infer
from service.http.v2 import models as v2_models
from service.http.v2 import repository as v2_repository
from service.http.v2 import schemas as v2_schemas
from service.http.v2 import settings as v2_settings
from service.repository.catalog import Repository
from service.repository.desired_state import DesiredStateStore, LocalStateStore, SharedStateStore
from service.repository.loader import Loader
from service.repository.manager import ModelManager
from service.repository.model import EngineFactory, open_model
from service.repository.room import UNCHECKED, LocalRoom, Room, SharedRoom
from service.settings import Settings
from service.shared_state import worker_table
from service.system import cpu_quota, file_watch
from service.telemetry import logging_setup
from service.telemetry.log_level import LogLevel
from service.telemetry.metrics.registry import Metrics
from service.telemetry.request_recorder import logging_and_tracing

logger = logging.getLogger(__name__)


class Application(FastAPI):
    """FastAPI, but for inference requests, which never reach it."""

    handlers: Mapping[Protocol, InferenceHandler[Any]]
    connection: type[HttpToolsProtocol]  # for uvicorn's `http`
    tls: Tls | None
    log_level: LogLevel
    engine_threads: EngineThreads
    outermost: ASGIApp  # `dispatch`, or CORS around it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.outermost(scope, receive, send)

    async def dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            place = routes.find(scope["path"])
            if place is not None:
                handler = self.handlers[place.route.protocol]
                await asgi.answer(handler, place, scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    async def refresh(self, *, now: bool = False) -> None:
        """Reads keys and certificates again, if their files have changed or in any case."""
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
    threads = EngineThreads.of(cpu_quota.threads_per_worker(settings.workers))
    manager = _manager(settings, metrics, repository, engine_factory, threads, shared)
    access = Access(
        settings.access,
        metrics.denied,
        metrics.keys_reload_failed.set,
        settings.hosts,
        settings.cors.origins,
    )
    recorder = logging_and_tracing(settings)
    logging_setup.count_dropped(metrics.log_lines_dropped)
    state = AppState(settings, metrics, repository, manager, access, recorder)

    app = Application(
        title="Doubly sparse softmax",
        version=version("doubly-sparse-softmax"),
        lifespan=_lifespan,
        redirect_slashes=False,
        redoc_url=None,
        docs_url=None,
        swagger_ui_oauth2_redirect_url=None,
        # FastAPI would trace its own routes too; the recorder traces all requests.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.service = state
    app.engine_threads = threads
    app.log_level = LogLevel(metrics.counters)
    app.tls = Tls(settings.tls, metrics.tls_reload_failed.set) if settings.tls.cert else None
    crossing = cors_options(settings.cors)
    app.outermost = app.dispatch if crossing is None else CORSMiddleware(app.dispatch, **crossing)
    app.add_middleware(Authorize, access=access)
    app.add_middleware(SecurityHeaders)
    app.add_middleware(ObserveRequests, metrics=metrics, recorder=recorder)
    problems.add_handlers(app)
    query.add_handler(app)
    app.handlers = {"native": NativeHandler(state), "v2": V2Handler(state)}
    repository.on_switch += [handler.refresh for handler in app.handlers.values()]
    app.connection = connection_class(state, app.handlers)
    topk.add_routes(app)
    models.add_routes(app, state)
    operations.add_routes(app, state)
    explorer.add_routes(app, state)
    v2_models.add_routes(app, state)
    v2_infer.add_routes(app)
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
    managing = asyncio.create_task(_manage_models(state))
    watching = asyncio.create_task(file_watch.every_second(app.refresh))
    updating = asyncio.create_task(file_watch.every_second(partial(_update_drift, state.metrics)))
    yield
    watching.cancel()
    updating.cancel()
    state.draining = True
    state.manager.stop()
    await managing
    await state.manager.close()
    app.engine_threads.close()
    await asyncio.to_thread(state.recorder.close)


async def _update_drift(metrics: Metrics) -> None:
    """In a thread, since everything that is counted of many models takes long to read."""
    await asyncio.to_thread(metrics.look, monotonic())


def _manager(
    settings: Settings,
    metrics: Metrics,
    repository: Repository,
    engine_factory: EngineFactory,
    threads: EngineThreads,
    shared: Path | None,
) -> ModelManager:
    if shared is None:
        board: DesiredStateStore = LocalStateStore()
        snapshot: Snapshot = snapshots.private_copy
        room: Room = LocalRoom()
    else:
        board = SharedStateStore(shared, metrics.counters, partial(worker_table.read, shared))
        snapshot = SharedSnapshots(shared / "snapshots")
        room = SharedRoom(shared, settings.workers)
    opener = partial(
        open_model,
        settings=settings,
        metrics=metrics,
        engine_factory=engine_factory,
        threads=threads,
        snapshot=snapshot,
        room=room if settings.repository.check_memory else UNCHECKED,
    )
    loader = Loader(opener, repository, metrics, settings.repository.keep_versions)
    return ModelManager(
        settings.models, repository, loader, board, metrics, settings.repository.poll_seconds
    )


async def _manage_models(state: AppState) -> None:
    try:
        await state.manager.run()
    except DSSError as error:
        logger.error("%s", error)
        state.load_failed = True
    except Exception:
        logger.exception("Loading the models failed.")
        state.load_failed = True


def _document(app: FastAPI, state: AppState) -> None:
    """/openapi.json is built when first asked for, with an example from the default model."""
    described = (*schemas.DESCRIBED, *v2_schemas.DESCRIBED)

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            if not state.repository.loaded:
                return openapi.build(app, described, None)
            try:
                example = openapi.example(state.repository.get())
            except Exception:
                logger.warning("The API is documented without an example.", exc_info=True)
                return openapi.build(app, described, None)
            app.openapi_schema = openapi.build(app, described, example)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
