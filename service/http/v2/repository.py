"""Triton's model repository extension: what there is, and loading and unloading it."""

from collections.abc import Iterator
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response

from service.errors import NotSupported
from service.http import openapi
from service.http.auth.access import needs
from service.http.fields import InvalidField, UnknownField
from service.http.state import AppState
from service.http.v2.responses import v2_responses
from service.http.v2.schemas import V2IndexEntry, V2IndexRequest, V2LoadRequest, V2UnloadRequest
from service.repository.catalog import Entry, Repository

BODY_ERRORS = (400, 401, 403, 408, 413, 422, 503)


def add_routes(app: FastAPI, state: AppState) -> None:
    manager, repository = state.manager, state.repository

    @app.post(
        "/v2/repository/index",
        tags=["v2"],
        responses=v2_responses(*BODY_ERRORS),
        response_model_exclude_none=True,
        openapi_extra=openapi.json_body(V2IndexRequest, required=False),
    )
    @needs("query")  # it is POSTed to, and changes nothing
    async def index(request: Request) -> list[V2IndexEntry]:
        """Every version that was found, and whether it answers."""
        asked = await state.read_object(request, optional=True)
        ready = asked.pop("ready", False)
        _only(set(), asked)
        if not isinstance(ready, bool):
            raise InvalidField("'ready' must be true or false.")
        entries = repository.catalog.entries.values()
        listed = [found for entry in entries for found in _index(repository, entry)]
        return [found for found in listed if found.state == "READY" or not ready]

    @app.post(
        "/v2/repository/models/{name}/load",
        tags=["v2"],
        response_class=Response,
        responses=v2_responses(*BODY_ERRORS, 404, 504),
        openapi_extra=openapi.json_body(V2LoadRequest, required=False),
    )
    async def load(name: str, request: Request) -> Response:
        """Look at a model's folder now, even if it was unloaded; its newest version serves."""
        asked = await state.read_object(request, optional=True)
        if _parameters(asked):
            raise NotSupported("A model is loaded as its folder has it; there are no parameters.")
        await manager.load_model(name)
        return Response()

    @app.post(
        "/v2/repository/models/{name}/unload",
        tags=["v2"],
        response_class=Response,
        responses=v2_responses(*BODY_ERRORS, 404, 504),
        openapi_extra=openapi.json_body(V2UnloadRequest, required=False),
    )
    async def unload(name: str, request: Request) -> Response:
        """Serve nothing of a model until it is loaded by name; its folder stays as it is."""
        asked = await state.read_object(request, optional=True)
        _only({"unload_dependents"}, _parameters(asked))  # there are none, so it means nothing
        await manager.unload_model(name)
        return Response()


def _parameters(asked: dict[str, Any]) -> dict[str, Any]:
    parameters = asked.pop("parameters", {})
    _only(set(), asked)
    if not isinstance(parameters, dict):
        raise InvalidField("'parameters' must be a JSON object.")
    return parameters


def _only(known: set[str], given: dict[str, Any]) -> None:
    for name in given.keys() - known:
        raise UnknownField(f"There is no field {name[:64]!r} here.")


def _index(repository: Repository, entry: Entry) -> Iterator[V2IndexEntry]:
    for version in repository.listed(entry):
        state: Literal["READY", "LOADING", "UNAVAILABLE"] = "UNAVAILABLE"
        reason = None
        if version in entry.versions:
            state = "READY"
        elif (entry.name, version) in repository.loading:
            state = "LOADING"
        else:
            reason = entry.refused.get(version) or ("unloaded" if entry.unloaded else "not loaded")
        yield V2IndexEntry(name=entry.name, version=str(version), state=state, reason=reason)
