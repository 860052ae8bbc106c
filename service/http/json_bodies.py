"""Small JSON bodies, of requests that change something."""

from typing import Any

from fastapi import Request

from service.http import body as limits
from service.http import codecs
from service.http.codecs import InvalidField
from service.http.state import AppState


async def read_object(
    request: Request, state: AppState, *, optional: bool = False
) -> dict[str, Any]:
    """A JSON object, read within the limits that all bodies have; none is an empty one."""
    announced = request.headers.get("content-length")
    read = limits.read_body(
        request.receive,
        None if announced is None else announced.encode("latin-1"),
        state.settings.limits,
        state.budget,
    )
    body = read if isinstance(read, bytes) else await read
    if optional and not body:
        return {}
    document = codecs.parse_json(body)
    if not isinstance(document, dict):
        raise InvalidField("The body must be a JSON object.")
    return document
