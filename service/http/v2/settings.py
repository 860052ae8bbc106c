"""What Triton's clients may read and change of a server: its log, traces and shared memory.

There is no shared memory here, and traces are set up by the environment; both say so when asked.
"""

import logging
from typing import Any

from fastapi import FastAPI, Request

from service.errors import NotSupported
from service.http import openapi
from service.http.fields import InvalidField, UnknownField
from service.http.state import AppState
from service.http.v2.responses import v2_responses
from service.http.v2.schemas import (
    V2Done,
    V2LogSettings,
    V2LogUpdate,
    V2Region,
    V2TraceSettings,
    V2TraceUpdate,
)
from service.telemetry.log_level import LogLevel

SWITCHES = {
    "log_verbose_level": logging.DEBUG,
    "log_info": logging.INFO,
    "log_warning": logging.WARNING,
    "log_error": logging.ERROR,
}
STEP = logging.INFO - logging.DEBUG  # from a level to the next
LOG_FORMAT = "ISO8601"
CHANGE_ERRORS = (400, 401, 403, 408, 413, 422)


def add_routes(app: FastAPI, state: AppState, log_level: LogLevel) -> None:
    _add_logging(app, state, log_level)
    _add_traces(app, state)
    for kind in ("system", "cuda"):
        _add_shared_memory(app, kind)


# --- the log ---------------------------------------------------------------------------------


def _add_logging(app: FastAPI, state: AppState, log_level: LogLevel) -> None:
    @app.get("/v2/logging", tags=["v2"], responses=v2_responses())
    async def log_settings() -> V2LogSettings:
        """What is logged."""
        return _log_settings(log_level.now)

    @app.post(
        "/v2/logging",
        tags=["v2"],
        responses=v2_responses(*CHANGE_ERRORS),
        openapi_extra=openapi.json_body(V2LogUpdate),
    )
    async def change_log_settings(request: Request) -> V2LogSettings:
        """Log more or less, in all workers within a second."""
        log_level.change(changed_level(log_level.now, await state.read_object(request)))
        return _log_settings(log_level.now)


def _log_settings(level: int) -> V2LogSettings:
    return V2LogSettings(
        log_file="",
        log_info=level <= logging.INFO,
        log_warning=level <= logging.WARNING,
        log_error=level <= logging.ERROR,
        log_verbose_level=int(level <= logging.DEBUG),
        log_format=LOG_FORMAT,
    )


def changed_level(level: int, asked: dict[str, Any]) -> int:
    """The level that shows what is asked for, as near as can be to the one before.

    A switch that is on shows its level and the graver ones; one that is off hides its level and
    the lesser ones.
    """
    lowest, highest = logging.DEBUG, logging.CRITICAL
    known = (*SWITCHES, "log_file", "log_format")
    for name, value in asked.items():
        if name not in known:
            raise UnknownField(
                f"There is no such log setting; the settings are {', '.join(known)}."
            )
        if value is None:
            continue
        if name in SWITCHES:
            if _is_on(name, value):
                highest = min(highest, SWITCHES[name])
            else:
                lowest = max(lowest, SWITCHES[name] + STEP)
        elif name == "log_file":
            if value != "":
                raise NotSupported("The log goes to stderr; 'log_file' cannot be changed.")
        elif value != LOG_FORMAT:
            raise NotSupported(
                "The log's format is chosen when the server starts; 'log_format' cannot be changed."
            )
    if lowest > highest:
        raise InvalidField("A level cannot be shown without the graver ones.")
    return min(max(level, lowest), highest)


def _is_on(name: str, value: object) -> bool:
    if name == "log_verbose_level":
        if type(value) is not int or value < 0:
            raise InvalidField("'log_verbose_level' must be an integer from 0 on.")
        return value > 0
    if not isinstance(value, bool):
        raise InvalidField(f"{name!r} must be true or false.")
    return value


# --- traces ----------------------------------------------------------------------------------


def _add_traces(app: FastAPI, state: AppState) -> None:
    repository = state.repository
    changed = openapi.json_body(V2TraceUpdate)

    @app.get("/v2/trace/setting", tags=["v2"], responses=v2_responses())
    async def trace_settings() -> V2TraceSettings:
        """Whether requests are traced."""
        return _trace_settings(state)

    @app.get("/v2/models/{name}/trace/setting", tags=["v2"], responses=v2_responses(404, 503))
    async def model_trace_settings(name: str) -> V2TraceSettings:
        """Whether requests for a model are traced: all are, or none."""
        repository.entry(name)
        return _trace_settings(state)

    @app.post(
        "/v2/trace/setting",
        tags=["v2"],
        responses=v2_responses(*CHANGE_ERRORS),
        openapi_extra=changed,
    )
    async def change_trace_settings(request: Request) -> V2TraceSettings:
        """Accepts what would change nothing: traces are set up by the environment."""
        return _unchanged(state, await state.read_object(request))

    @app.post(
        "/v2/models/{name}/trace/setting",
        tags=["v2"],
        responses=v2_responses(*CHANGE_ERRORS, 404, 503),
        openapi_extra=changed,
    )
    async def change_model_trace_settings(name: str, request: Request) -> V2TraceSettings:
        """Accepts what would change nothing: traces are set up by the environment."""
        repository.entry(name)
        return _unchanged(state, await state.read_object(request))


def _trace_settings(state: AppState) -> V2TraceSettings:
    return V2TraceSettings(trace_level=["TIMESTAMPS" if state.recorder.tracing else "OFF"])


def _unchanged(state: AppState, asked: dict[str, Any]) -> V2TraceSettings:
    settings = _trace_settings(state)
    wanted = {name: value for name, value in asked.items() if value is not None}
    if not wanted.items() <= settings.model_dump().items():
        raise NotSupported(
            "Traces are set up by the OTEL_* environment variables when the server starts; they"
            " cannot be changed."
        )
    return settings


# --- shared memory ---------------------------------------------------------------------------


def _add_shared_memory(app: FastAPI, kind: str) -> None:
    base = f"/v2/{kind}sharedmemory"

    @app.get(f"{base}/status", tags=["v2"], responses=v2_responses())
    async def regions() -> list[V2Region]:
        """The regions that are registered: none."""
        return []

    @app.get(f"{base}/region/{{region}}/status", tags=["v2"], responses=v2_responses(400))
    async def region(region: str) -> list[V2Region]:
        """Fails: no region is registered."""
        raise NotSupported(f"There is no shared memory region {region[:64]!r}.")

    @app.post(
        f"{base}/region/{{region}}/register",
        tags=["v2"],
        responses=v2_responses(400, 401, 403),
    )
    async def register(region: str) -> V2Done:
        """Fails: there is no shared memory."""
        del region
        raise NotSupported(
            "There is no shared memory: send tensors in the request, best as binary data."
        )

    @app.post(f"{base}/unregister", tags=["v2"], responses=v2_responses(401, 403))
    async def unregister_all() -> V2Done:
        """Does nothing: no region is registered."""
        return V2Done()

    @app.post(
        f"{base}/region/{{region}}/unregister",
        tags=["v2"],
        responses=v2_responses(401, 403),
    )
    async def unregister(region: str) -> V2Done:
        """Does nothing: no region is registered."""
        del region
        return V2Done()
