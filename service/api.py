"""The routes."""

from collections.abc import Sequence

from fastapi import FastAPI, HTTPException
from fastapi.responses import RedirectResponse, Response
from prometheus_client import generate_latest

from service import health, openapi, schemas
from service.model import Model
from service.repository import Entry
from service.state import State


def add_routes(app: FastAPI, state: State) -> None:
    _add_topk(app)
    _add_models(app, state)
    _add_operations(app, state)


def _add_topk(app: FastAPI) -> None:
    """For the document, and so that other methods are answered with 405; hot.py does the work."""

    @app.post("/topk", **openapi.TOPK)
    async def topk() -> Response:
        """The k most probable classes for each row, by the default model."""
        raise HTTPException(404)

    @app.post("/models/{name}/topk", **openapi.TOPK)
    async def model_topk(name: str) -> Response:
        """The k most probable classes for each row, by the newest good version of a model."""
        del name
        raise HTTPException(404)

    @app.post("/models/{name}/versions/{version}/topk", **openapi.TOPK)
    async def version_topk(name: str, version: str) -> Response:
        """The k most probable classes for each row, by one version of a model."""
        del name, version
        raise HTTPException(404)


def _add_models(app: FastAPI, state: State) -> None:
    repository = state.repository

    @app.get("/models", tags=["models"], responses=openapi.problem_responses(503))
    async def models() -> schemas.ModelList:
        """Every model, with its versions and the bundles that were refused."""
        entries = repository.catalog.entries.values()
        return schemas.ModelList(models=[_model_info(state, entry) for entry in entries])

    @app.get("/models/{name}", tags=["models"], responses=openapi.problem_responses(404, 503))
    async def model(name: str) -> schemas.ModelInfo:
        """One model."""
        return _model_info(state, repository.entry(name))

    @app.get(
        "/models/{name}/experts", tags=["models"], responses=openapi.problem_responses(404, 503)
    )
    async def experts(name: str) -> schemas.ExpertList:
        """What each expert of a model's newest good version holds, and what it has done."""
        return _experts(repository.get(name))


def _model_info(state: State, entry: Entry) -> schemas.ModelInfo:
    newest = entry.newest
    return schemas.ModelInfo(
        name=entry.name,
        default=entry.name == state.repository.default_name,
        version=newest.version if newest else None,
        versions=[_version_info(model) for model in entry.versions.values()],
        refused=[
            schemas.RefusedVersion(version=version, reason=reason)
            for version, reason in entry.refused.items()
        ],
    )


def _version_info(model: Model) -> schemas.VersionInfo:
    manifest = model.manifest
    return schemas.VersionInfo(
        version=model.version,
        n_classes=manifest.n_classes,
        hidden_size=manifest.hidden_size,
        n_experts=manifest.n_experts,
        labels=manifest.labels,
        created=manifest.created,
        accuracy=manifest.training.accuracy,
        trained_flops_speedup=manifest.training.flops_speedup,
        flops_speedup=model.metrics.flops_speedup,
    )


def _experts(model: Model) -> schemas.ExpertList:
    manifest, metrics = model.manifest, model.metrics
    utilization: Sequence[float | None] = metrics.utilization or [None] * manifest.n_experts
    columns = zip(
        manifest.expert_sizes,
        manifest.training.utilization,
        metrics.expert_rows,
        utilization,
        metrics.expert_mean_seconds,
        strict=True,
    )
    return schemas.ExpertList(
        model=model.name,
        version=model.version,
        experts=[
            schemas.ExpertInfo(
                expert=expert,
                classes=classes,
                trained_utilization=trained,
                rows=rows,
                utilization=live,
                mean_seconds=seconds,
            )
            for expert, (classes, trained, rows, live, seconds) in enumerate(columns)
        ],
    )


def _add_operations(app: FastAPI, state: State) -> None:
    not_ok = openapi.problem_responses(503)

    @app.get("/livez", tags=["operations"], responses=not_ok)
    async def livez() -> schemas.Health:
        """Fails when only a restart helps."""
        health.check_live(state)
        return schemas.Health()

    @app.get("/readyz", tags=["operations"], responses=not_ok)
    async def readyz() -> schemas.Health:
        """Fails while requests should go elsewhere."""
        await health.check_ready(state)
        return schemas.Health()

    @app.get("/startupz", tags=["operations"], responses=not_ok)
    async def startupz() -> schemas.Health:
        """Fails until the models have been loaded."""
        health.check_started(state)
        return schemas.Health()

    @app.get("/metrics", tags=["operations"], **openapi.METRICS)
    def metrics() -> Response:
        """Everything that is counted, for Prometheus."""
        body = generate_latest(state.metrics.registry)
        return Response(body, headers={"content-type": openapi.METRICS_TYPE})

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("docs")
