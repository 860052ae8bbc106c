"""/: the page that shows what is in the models. Its files hold no secret, so no key is asked for.

The page is plain HTML, CSS and ES modules, in the folder `page`. Its addresses are relative, so
that it also works behind a proxy's prefix.
"""

from pathlib import Path

from fastapi import FastAPI, HTTPException
from fastapi.responses import HTMLResponse, Response

from service.http.auth.access import needs

FOLDER = Path(__file__).parent.parent / "page"
INDEX = "index.html"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def add_routes(app: FastAPI) -> None:
    page = (FOLDER / INDEX).read_bytes()
    # Read once, so that an upgrade of the package does not change a page by halves.
    files = {
        path.name: (path.read_bytes(), MEDIA_TYPES[path.suffix])
        for path in FOLDER.iterdir()
        if path.suffix in MEDIA_TYPES
    }

    @app.get("/", include_in_schema=False)
    @needs("nothing")  # a browser sends no key when it opens a page
    async def explorer() -> Response:
        return HTMLResponse(page)

    @app.get("/page/{file}", include_in_schema=False)
    @needs("nothing")
    async def part(file: str) -> Response:
        if file not in files:
            raise HTTPException(404)
        content, media_type = files[file]
        return Response(content, headers={"content-type": media_type})
