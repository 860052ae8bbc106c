"""Strict query strings: an unknown, repeated or oddly written parameter is refused, not ignored.

A route takes a subclass of `QueryParameters` as `Annotated[..., Query()]` and depends on `ONCE`.
"""

import re
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, ConfigDict

from service.http import problems
from service.http.fields import InvalidField, UnknownField

DIGITS = re.compile(r"[0-9]{1,18}")


class QueryParameters(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _digits(value: object) -> object:
    """pydantic alone would take "1_0", "+1" and "1.0" for numbers."""
    if isinstance(value, str) and not DIGITS.fullmatch(value):
        raise ValueError("it should be a whole number")
    return value


Whole = Annotated[int, BeforeValidator(_digits)]


async def _refuse_repeated(request: Request) -> None:
    """FastAPI alone would take the last of two parameters of a name for both."""
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if names.count(name) > 1:
            raise InvalidField(f"The query string has {name[:40]!r} twice.")


ONCE = [Depends(_refuse_repeated)]


def add_handler(app: FastAPI) -> None:
    async def on_wrong_parameters(request: Request, error: Exception) -> Response:
        if not isinstance(error, RequestValidationError):
            raise error
        refusal = _refusal(error, request)
        request.scope[problems.REASON] = problems.reason(refusal)
        return problems.of_failure(refusal, request.scope["path"])

    app.add_exception_handler(RequestValidationError, on_wrong_parameters)


def _refusal(error: RequestValidationError, request: Request) -> InvalidField | UnknownField:
    first = error.errors()[0]
    name, text = str(first["loc"][-1])[:40], first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        known = [
            field
            for parameter in request.scope["route"].dependant.query_params
            for field in parameter.field_info.annotation.model_fields
        ]
        return UnknownField(f"There is no parameter {name!r} here; there are {', '.join(known)}.")
    return InvalidField(f"The parameter {name!r} is wrong: {text[0].lower()}{text[1:]}.")
