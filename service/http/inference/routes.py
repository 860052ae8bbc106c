"""The table of inference routes; dispatch, documentation, access and method errors follow it."""

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from fastapi import FastAPI, HTTPException
from fastapi.responses import Response

from service.http.auth.access import Needs, needs

NEEDS: Needs = "query"

Protocol = Literal["native", "v2"]


class InferenceRoute(NamedTuple):
    name: str
    protocol: Protocol
    template: str  # as FastAPI has it
    description: str
    pattern: re.Pattern[str]


class Place(NamedTuple):
    """A route, and what a request's path says of the model."""

    route: InferenceRoute
    name: str | None  # None: the default model
    version: str | None  # None: the newest good one


def _route(name: str, protocol: Protocol, template: str, by: str) -> InferenceRoute:
    pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", template)
    description = f"The k most probable classes for each row, by {by}."
    return InferenceRoute(name, protocol, template, description, re.compile(pattern))


ROUTES = (
    _route("topk", "native", "/topk", "the default model"),
    _route("model_topk", "native", "/models/{name}/topk", "the newest good version of a model"),
    _route(
        "version_topk", "native", "/models/{name}/versions/{version}/topk",
        "one version of a model",
    ),
    _route("infer", "v2", "/v2/models/{name}/infer", "the version that serves if none is named"),
    _route(
        "version_infer", "v2", "/v2/models/{name}/versions/{version}/infer",
        "one version of a model",
    ),
)  # fmt: skip


def find(path: str) -> Place | None:
    """The route of a POST to this path."""
    for route in ROUTES:
        found = route.pattern.fullmatch(path)
        if found is not None:
            parts = found.groupdict()
            return Place(route, parts.get("name"), parts.get("version"))
    return None


def declare(app: FastAPI, protocol: Protocol, **documentation: Any) -> None:
    """Tells FastAPI of the routes: for /openapi.json, and to answer other methods with 405."""
    for route in ROUTES:
        if route.protocol == protocol:
            app.add_api_route(
                route.template,
                _endpoint(route),
                methods=["POST"],
                name=route.name,
                description=route.description,
                **documentation,
            )


def _endpoint(route: InferenceRoute) -> Callable[..., Any]:
    """What FastAPI reads the path's parameters from; requests never come here (`http/app.py`)."""

    @needs(NEEDS)
    async def of_default() -> Response:
        raise HTTPException(404)

    @needs(NEEDS)
    async def of_model(name: str) -> Response:
        raise HTTPException(404, name)

    @needs(NEEDS)
    async def of_version(name: str, version: str) -> Response:
        raise HTTPException(404, f"{name} {version}")

    return (of_default, of_model, of_version)[route.pattern.groups]
