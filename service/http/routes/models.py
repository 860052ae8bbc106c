"""What models and versions there are, and versions' aliases (`labels` in paths and fields)."""

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI, Request

from service.http import openapi, schemas
from service.http.fields import InvalidField, UnknownField
from service.http.state import AppState
from service.repository.catalog import Entry, ModelNotFound
from service.repository.model import Model


def add_routes(app: FastAPI, state: AppState) -> None:
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

    label_responses = openapi.problem_responses(400, 401, 403, 404, 408, 409, 413, 422, 503, 504)

    @app.put(
        "/models/{name}/labels/{label}",
        tags=["models"],
        responses=label_responses,
        openapi_extra=openapi.json_body(schemas.LabelRequest),
    )
    async def set_label(name: str, label: str, request: Request) -> schemas.ModelInfo:
        """Point a label at a version, which is loaded if it must be."""
        asked = await state.read_object(request)
        await state.manager.set_alias(name, label, _asked_version(asked))
        return _model_info(state, repository.entry(name))

    @app.delete("/models/{name}/labels/{label}", tags=["models"], responses=label_responses)
    async def remove_label(name: str, label: str) -> schemas.ModelInfo:
        """Remove a label."""
        await state.manager.remove_alias(name, label)
        return _model_info(state, repository.entry(name))


def _asked_version(asked: dict[str, Any]) -> int:
    version = asked.pop("version", None)
    for name in asked:
        raise UnknownField(f"There is no field {name[:64]!r} here.")
    if type(version) is not int or version < 1:
        raise InvalidField("'version' must be the number of a version.")
    return version


def _model_info(state: AppState, entry: Entry) -> schemas.ModelInfo:
    chosen = entry.chosen
    return schemas.ModelInfo(
        name=entry.name,
        default=_is_default(state, entry),
        version=chosen.version if chosen else None,
        versions=[_version_info(model) for model in entry.versions.values()],
        refused=[
            schemas.RefusedVersion(version=version, reason=reason)
            for version, reason in entry.refused.items()
        ],
        found=[
            _found(entry, version, state.repository.loading)
            for version in state.repository.listed(entry)
        ],
        labels=dict(entry.aliases),
        label_problems=dict(entry.alias_problems),
    )


def _is_default(state: AppState, entry: Entry) -> bool:
    try:
        return entry.name == state.repository.default_name
    except ModelNotFound:  # nothing is loaded
        return False


def _found(
    entry: Entry, version: int, loading: Collection[tuple[str, int]]
) -> schemas.FoundVersion:
    reason = entry.refused.get(version)
    if version in entry.versions:
        if version in entry.gone:
            reason = "Its folder is gone."
        elif reason is not None:
            reason = f"Its bundle was replaced, and the new one refused: {reason}"
        return schemas.FoundVersion(version=version, state="loaded", reason=reason)
    if (entry.name, version) in loading:
        return schemas.FoundVersion(version=version, state="loading")
    if reason is not None:
        return schemas.FoundVersion(version=version, state="refused", reason=reason)
    reason = "The model was unloaded." if entry.unloaded else None
    return schemas.FoundVersion(version=version, state="not loaded", reason=reason)


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
        flops_speedup=model.metrics.flops_speedup(),
        objective=model.engine.objective,
        can_exact=model.engine.can_exact,
        contract=_contract(model),
    )


def _contract(model: Model) -> schemas.ContractInfo | None:
    found = model.engine.contract
    if found is None:
        return None
    return schemas.ContractInfo(
        rows=found.rows, levels=found.levels, ks=found.ks, exact_only=found.exact_only
    )
