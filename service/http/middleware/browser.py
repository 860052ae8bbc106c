"""What browsers are told: what to trust on a page, and which other origins may ask.

The security headers stand on every answer but those to inference requests, which no browser shows.
"""

from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.settings import CorsSettings

PREFLIGHT_SECONDS = 600
NOTHING = "default-src 'none'; frame-ancestors 'none'"
# For pages: only what this server itself serves. Pictures in style sheets may be inline.
PAGE = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
ALWAYS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class SecurityHeaders:
    """What a route has set itself is left alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                page = headers.get("content-type", "").startswith("text/html")
                headers.setdefault("Content-Security-Policy", PAGE if page else NOTHING)
                for name, value in ALWAYS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, sending)


def cors_options(settings: CorsSettings) -> dict[str, Any] | None:
    """For Starlette's CORSMiddleware: which pages of other origins may ask; None if none may.

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
