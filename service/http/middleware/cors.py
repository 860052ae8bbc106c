"""CORS: which pages of other origins may ask from a browser. Off unless origins are set."""

from typing import Any

from service.settings import CorsSettings

PREFLIGHT_SECONDS = 600


def options(settings: CorsSettings) -> dict[str, Any] | None:
    """For Starlette's CORSMiddleware; None if no origin is allowed.

    Keys are sent in a header of the page's own making, never as cookies, so no credentials.
    """
    if not settings.origins:
        return None
    return {
        "allow_origins": settings.origins,
        "allow_methods": ("GET", "POST", "PUT", "DELETE"),
        "allow_headers": (
            "Accept",
            "Authorization",
            "Content-Type",
            "DSS-Timeout",
            "Inference-Header-Content-Length",
            "traceparent",
            "tracestate",
            "X-Request-Id",
        ),
        "expose_headers": (
            "DSS-Model",
            "DSS-Model-Version",
            "Inference-Header-Content-Length",
            "Retry-After",
            "X-Request-Id",
        ),
        "max_age": PREFLIGHT_SECONDS,
    }
