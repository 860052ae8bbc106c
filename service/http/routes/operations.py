"""Probes and metrics: what operators and their tools ask."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from service.http import health, openapi, schemas
from service.http.auth.access import needs
from service.http.openapi import problem_responses
from service.http.state import AppState
from service.telemetry.metrics.exposition import text
from service.telemetry.metrics.page import MetricsPage

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METRICS: Mapping[str, Any] = {
    "response_class": Response,
    "responses": {
        200: {
            "description": "The Prometheus text format.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
        **problem_responses(),
    },
}


def add_routes(app: FastAPI, state: AppState) -> None:
    page = MetricsPage(lambda: text(state.metrics.registry.collect()))
    not_ok = openapi.problem_responses(503)

    @app.get("/livez", tags=["operations"], responses=not_ok)
    @needs("nothing")
    async def livez() -> schemas.Health:
        """Answered as long as the event loop runs."""
        return schemas.Health()

    @app.get("/readyz", tags=["operations"], responses=not_ok)
    @needs("nothing")
    async def readyz() -> schemas.Health:
        """Fails while requests should go elsewhere."""
        await health.check_ready(state)
        return schemas.Health()

    @app.get("/startupz", tags=["operations"], responses=not_ok)
    @needs("nothing")
    async def startupz() -> schemas.Health:
        """Fails until the models have been loaded."""
        health.check_started(state)
        return schemas.Health()

    @app.get("/metrics", tags=["operations"], **METRICS)
    @needs("metrics")
    async def metrics() -> Response:
        """Everything that is counted, for Prometheus."""
        return Response(await page.get(), headers={"content-type": METRICS_TYPE})
