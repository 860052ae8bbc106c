"""Wiring: settings in, an application out."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, ProcessCollector
from starlette.types import Receive, Scope, Send

from service import api, hot, openapi, problems, v2
from service.edge import Edge
from service.engine import Engine
from service.errors import DSSError
from service.hot import TopKPath
from service.metrics import Metrics
from service.model import EngineFactory, open_model
from service.protocol import HotProtocol, protocol
from service.repository import Repository
from service.settings import Settings
from service.state import State
from service.v2 import InferPath

logger = logging.getLogger(__name__)


class Application(FastAPI):
    """FastAPI, but for the hot paths, which never reach it."""

    topk: TopKPath
    infer: InferPath
    protocol: type[HotProtocol]  # for uvicorn's `http`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            place = hot.place(scope["path"])
            if place is not None:
                path = self.topk if place.native else self.infer
                await path(place, scope, receive, send)
                return
        await super().__call__(scope, receive, send)


def create_app(
    settings: Settings,
    registry: CollectorRegistry | None = None,
    engine_factory: EngineFactory | None = None,
    metrics: Metrics | None = None,
) -> Application:
    if registry is None:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
    if metrics is None:
        metrics = Metrics(registry)
    if engine_factory is None:
        engine_factory = partial(Engine, backend=settings.engine.backend)
    opener = partial(open_model, settings=settings, metrics=metrics, engine_factory=engine_factory)
    repository = Repository(settings.models, opener, settings.default_model)
    state = State(settings, metrics, repository)

    app = Application(
        title="Doubly sparse softmax",
        version=version("doubly-sparse-softmax"),
        lifespan=_lifespan,
        redirect_slashes=False,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    app.state.service = state
    app.add_middleware(Edge, metrics=metrics)
    problems.add_handlers(app)
    app.topk, app.infer = TopKPath(state), InferPath(state)
    app.protocol = protocol(app.topk, app.infer, settings.limits.max_body_bytes)
    api.add_routes(app, state)
    v2.add_routes(app, state)
    _document(app, state)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Models are loaded beside the server, so that /livez answers from the first moment."""
    state: State = app.state.service
    loading = asyncio.create_task(_load(state))
    yield
    state.draining = True
    await loading
    await state.repository.close()


async def _load(state: State) -> None:
    try:
        await asyncio.to_thread(state.repository.load)
    except DSSError as error:
        logger.error("%s", error)
        state.load_failed = True
    except Exception:
        logger.exception("Loading the models failed.")
        state.load_failed = True
    else:
        for entry in state.repository.catalog.entries.values():
            for refused in entry.refused:
                state.metrics.refused_bundles.labels(entry.name, str(refused)).set(1)


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
