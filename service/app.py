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

from service import api, openapi, problems
from service.edge import Edge
from service.engine import Engine
from service.errors import DSSError
from service.metrics import Metrics
from service.model import EngineFactory, open_model
from service.repository import Repository
from service.settings import Settings
from service.state import State

logger = logging.getLogger(__name__)


def create_app(
    settings: Settings,
    registry: CollectorRegistry | None = None,
    engine_factory: EngineFactory | None = None,
) -> FastAPI:
    if registry is None:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
    metrics = Metrics(registry)
    if engine_factory is None:
        engine_factory = partial(Engine, backend=settings.engine.backend)
    opener = partial(open_model, settings=settings, metrics=metrics, engine_factory=engine_factory)
    repository = Repository(settings.models, opener, settings.default_model)
    state = State(settings, metrics, repository)

    app = FastAPI(
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
    api.add_routes(app, state)
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
