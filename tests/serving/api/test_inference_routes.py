"""The table of inference routes against FastAPI's own."""

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Match

from service.http.app import create_app
from service.http.inference import routes
from service.settings import Settings

# --- which paths are hot ---------------------------------------------------------------------

SEGMENTS = st.sampled_from(
    ["", "topk", "models", "versions", "v2", "infer", "tiny", "1", "%", ".", " ", "é", "topk "]
)


@given(st.lists(SEGMENTS, max_size=8))
def test_a_path_is_dispatched_where_fastapi_has_an_inference_route(segments: list[str]) -> None:
    path = "/" + "/".join(segments)
    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": []}
    declared = [
        (route.path, found["path_params"])
        for route in ROUTES
        for match, found in [route.matches(scope)]
        if match == Match.FULL and "POST" in route.methods
    ]
    place = routes.find(path)
    if place is None:
        assert declared == []
    else:
        asked = {"name": place.name, "version": place.version}
        given_ = {name: value for name, value in asked.items() if value is not None}
        assert declared == [(place.route.template, given_)]


ROUTES: list[Any] = [
    route
    for route in create_app(Settings(models=Path("none"))).routes
    if getattr(route, "methods", None)
]
