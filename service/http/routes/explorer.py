"""The routes that show what is in a model, for the page at / and for anyone else.

Each stands under /models/{name}, for the version that answers when none is named, and under
/models/{name}/versions/{version}.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import orjson
from fastapi import Depends, FastAPI, Path, Request
from fastapi.responses import Response
from numpy.typing import NDArray

from service.http import openapi, parameters, schemas
from service.http.parameters import Choice, Number, Text
from service.http.routes.aside import Aside
from service.http.state import AppState
from service.repository import class_index
from service.repository.model import Model

Choose = Callable[..., Any]  # a dependency that finds the model

OFFSET = Number("offset", "How many to leave out at the beginning.", 0, 0)
CLASSES_LIMIT = Number("limit", "How many classes to answer with.", 100, 1, 1000)
SAMPLES_LIMIT = Number("limit", "How many samples to answer with.", 8, 1, 64)
FOUND_LIMIT = Number("limit", "How many classes to answer with.", 20, 1, 100)
SEARCH = Text("search", "A part of a class's name, in upper or lower case, or a class's id.", 256)
ROWS = Number(
    "rows", "At most so many rows: with more experts, a row stands for some.", 128, 1, 512
)
COLUMNS = Number("columns", "At most so many columns: each stands for some classes.", 256, 1, 512)
ORDER = Choice(
    "order", "Experts by their number, or by where the classes lie that they hold.",
    ("number", "class"),
)  # fmt: skip

WHOLE = {"type": "integer", "minimum": 0}
ExpertNumber = Annotated[str, Path(description="An expert, from 0", json_schema_extra=WHOLE)]
ClassNumber = Annotated[str, Path(description="A class's id, from 0", json_schema_extra=WHOLE)]


def add_routes(app: FastAPI, state: AppState) -> None:
    repository = state.repository

    async def newest(name: str) -> Model:
        return repository.get(name)

    async def one(name: str, version: str) -> Model:
        return repository.get(name, version)

    aside = Aside()
    for at, choose in (("/models/{name}", newest), ("/models/{name}/versions/{version}", one)):
        _add_experts(app, at, choose)
        _add_samples(app, at, choose)
        _add_classes(app, at, choose, aside)
        _add_matrix(app, at, choose, aside)


def _add_experts(app: FastAPI, at: str, choose: Choose) -> None:
    @app.get(f"{at}/experts", tags=["models"], responses=openapi.problem_responses(404, 503))
    async def experts(model: Annotated[Model, Depends(choose)]) -> schemas.ExpertList:
        """What each expert holds, and what it has done."""
        return _experts(model)

    @app.get(
        f"{at}/experts/{{expert}}/classes",
        tags=["models"],
        responses=openapi.problem_responses(404, 422, 503),
        openapi_extra=parameters.described(OFFSET, CLASSES_LIMIT),
    )
    async def expert_classes(
        model: Annotated[Model, Depends(choose)], expert: ExpertNumber, request: Request
    ) -> schemas.ExpertClasses:
        """The classes that an expert holds, in the order of their ids."""
        offset, limit = _asked(request, OFFSET, CLASSES_LIMIT)
        number = model.index.expert(expert)
        held = model.index.held(number)
        classes = held[offset : offset + limit]
        return schemas.ExpertClasses(
            model=model.name,
            version=model.version,
            expert=number,
            total=len(held),
            offset=offset,
            classes=classes.tolist(),
            labels=_labels(model, classes),
        )


def _add_samples(app: FastAPI, at: str, choose: Choose) -> None:
    @app.get(
        f"{at}/samples",
        tags=["models"],
        response_model=schemas.Samples,
        responses=openapi.problem_responses(404, 422, 503),
        openapi_extra=parameters.described(OFFSET, SAMPLES_LIMIT),
    )
    async def samples(model: Annotated[Model, Depends(choose)], request: Request) -> Response:
        """Hidden vectors to try a model with, which its bundle carries; there may be none."""
        offset, limit = _asked(request, OFFSET, SAMPLES_LIMIT)
        rows = _finite(model)
        return _json(
            model,
            total=len(rows),
            offset=offset,
            samples=np.ascontiguousarray(rows[offset : offset + limit]),
        )


def _add_classes(app: FastAPI, at: str, choose: Choose, aside: Aside) -> None:
    @app.get(
        f"{at}/classes",
        tags=["models"],
        responses=openapi.problem_responses(404, 422, 429, 503),
        openapi_extra=parameters.described(SEARCH, FOUND_LIMIT),
    )
    async def classes(
        model: Annotated[Model, Depends(choose)], request: Request
    ) -> schemas.ClassList:
        """Classes by a part of their names, or by id, and the experts that hold them."""
        text, limit = _asked(request, SEARCH, FOUND_LIMIT)
        found = await aside.run(_search, model, text, limit + 1)
        return schemas.ClassList(
            model=model.name,
            version=model.version,
            classes=found[:limit],
            more=len(found) > limit,
        )

    @app.get(
        f"{at}/classes/{{class_id}}",
        tags=["models"],
        responses=openapi.problem_responses(404, 429, 503),
    )
    async def one_class(
        model: Annotated[Model, Depends(choose)], class_id: ClassNumber
    ) -> schemas.OneClass:
        """A class's name and the experts that hold it; there may be none."""
        number = model.index.class_id(class_id)
        (found,) = await aside.run(_class_infos, model, [number])
        return schemas.OneClass(
            model=model.name,
            version=model.version,
            id=found.id,
            label=found.label,
            experts=found.experts,
        )


def _add_matrix(app: FastAPI, at: str, choose: Choose, aside: Aside) -> None:
    @app.get(
        f"{at}/matrix",
        tags=["models"],
        response_model=schemas.Matrix,
        responses=openapi.problem_responses(404, 422, 429, 503),
        openapi_extra=parameters.described(ROWS, COLUMNS, ORDER),
    )
    async def matrix(model: Annotated[Model, Depends(choose)], request: Request) -> Response:
        """Which experts hold which classes, counted in as many ranges as are asked for."""
        rows, columns, order = _asked(request, ROWS, COLUMNS, ORDER)
        counted = await aside.run(model.index.matrix, rows, columns, order)
        return _json(model, **counted._asdict())


def _asked(request: Request, *known: parameters.Parameter) -> list[Any]:
    query_string: bytes = request.scope["query_string"]
    return parameters.read(query_string, *known)


def _json(model: Model, **fields: object) -> Response:
    """Arrays become text without becoming lists first."""
    document = {"model": model.name, "version": model.version, **fields}
    content = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(content, media_type="application/json")


def _finite(model: Model) -> NDArray[np.float32]:
    """The samples that can be asked about."""
    if model.samples is None:
        return np.empty((0, model.manifest.hidden_size), np.float32)
    return model.samples[np.isfinite(model.samples).all(axis=1)]


def _labels(model: Model, classes: NDArray[np.integer[Any]]) -> list[str] | None:
    labels = model.source.labels
    return None if labels is None else labels[classes].tolist()


def _search(model: Model, text: str, most: int) -> list[schemas.ClassInfo]:
    """A class with this id comes first."""
    labels = model.source.labels
    text = text.strip()
    by_id = model.index.find_class(text)
    found = [] if by_id is None else [by_id]
    if labels is not None:
        found += [n for n in class_index.search_labels(labels, text, most) if n not in found]
    elif not text:
        found = list(range(min(most, model.index.n_classes)))
    return _class_infos(model, found[:most])


def _class_infos(model: Model, classes: Sequence[int]) -> list[schemas.ClassInfo]:
    experts = model.index.experts_of(classes)
    labels = model.source.labels
    return [
        schemas.ClassInfo(
            id=number,
            label=None if labels is None else labels[number],
            experts=experts[number],
        )
        for number in classes
    ]


def _experts(model: Model) -> schemas.ExpertList:
    manifest, metrics = model.manifest, model.metrics
    utilization: Sequence[float | None] = metrics.utilization or [None] * manifest.n_experts
    columns = zip(
        manifest.expert_sizes,
        manifest.training.utilization,
        metrics.expert_rows,
        utilization,
        metrics.expert_mean_seconds,
        strict=True,
    )
    return schemas.ExpertList(
        model=model.name,
        version=model.version,
        experts=[
            schemas.ExpertInfo(
                expert=expert,
                classes=classes,
                trained_utilization=trained,
                rows=rows,
                utilization=live,
                mean_seconds=seconds,
            )
            for expert, (classes, trained, rows, live, seconds) in enumerate(columns)
        ],
    )
