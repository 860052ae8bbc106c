"""/docs: Swagger UI from an installed package. The page asks no other host for anything."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse, HTMLResponse, Response

PACKAGE = "fastapi_swagger"  # carries Swagger UI's files; its code is not used
FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
# Addresses are relative, so that the page also works behind a proxy's prefix.
PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Doubly sparse softmax</title>
<link rel="icon" href="docs/favicon-32x32.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
START = """\
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  layout: "BaseLayout",
  validatorUrl: null,
});
"""
KEPT = {"Cache-Control": "private, max-age=3600"}


def add_routes(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(PAGE)

    @app.get("/docs/start.js", include_in_schema=False)
    async def start() -> Response:
        return Response(START, media_type="text/javascript", headers=KEPT)

    for name, media_type in FILES.items():
        _add_file(app, name, media_type)


def _add_file(app: FastAPI, name: str, media_type: str) -> None:
    @app.get(f"/docs/{name}", include_in_schema=False)
    async def file() -> Response:
        return FileResponse(_folder() / name, media_type=media_type, headers=KEPT)


@cache
def _folder() -> Path:
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"{PACKAGE} is not installed.")
    return Path(found.origin).parent / "resources"
