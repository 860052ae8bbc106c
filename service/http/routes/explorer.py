"""The routes that show what is in a model, for the page at / and for anyone else.

Each stands under /models/{name}, for the version that answers when none is named, and under
/models/{name}/versions/{version}.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from fastapi import Depends, FastAPI, Path, Query
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic import Field

from service.http import openapi, schemas
from service.http.query import ONCE, QueryParameters, Whole
from service.http.routes.searches import Searches
from service.http.state import AppState
from service.repository import class_index
from service.repository.model import Model

Choose = Callable[..., Any]  # a dependency that finds the model

Offset = Annotated[Whole, Field(ge=0, description="How many to leave out at the beginning.")]
N_CLASSES = "How many classes to answer with."


class ClassesPage(QueryParameters):
    offset: Offset = 0
    limit: Whole = Field(100, ge=1, le=1000, description=N_CLASSES)


class SamplesPage(QueryParameters):
    offset: Offset = 0
    limit: Whole = Field(8, ge=1, le=64, description="How many samples to answer with.")


class Search(QueryParameters):
    search: str = Field(
        "",
        max_length=256,
        description="A part of a class's name, in upper or lower case, or a class's id.",
    )
    limit: Whole = Field(20, ge=1, le=100, description=N_CLASSES)


class MatrixSize(QueryParameters):
    rows: Whole = Field(
        128,
        ge=1,
        le=512,
        description="At most so many rows: with more experts, a row stands for some.",
    )
    columns: Whole = Field(
        256,
        ge=1,
        le=512,
        description="At most so many columns: each stands for some classes.",
    )
    order: Literal["number", "class"] = Field(
        "number",
        description="Experts by their number, or by where the classes lie that they hold.",
    )


WHOLE = {"type": "integer", "minimum": 0}
ExpertNumber = Annotated[str, Path(description="An expert, from 0", json_schema_extra=WHOLE)]
ClassNumber = Annotated[str, Path(description="A class's id, from 0", json_schema_extra=WHOLE)]


def add_routes(app: FastAPI, state: AppState) -> None:
    repository = state.repository

    async def newest(name: str) -> Model:
        return repository.get(name)

    async def one(name: str, version: str) -> Model:
        return repository.get(name, version)

    searches = Searches()
    for at, choose in (("/models/{name}", newest), ("/models/{name}/versions/{version}", one)):
        _add_experts(app, at, choose)
        _add_samples(app, at, choose)
        _add_classes(app, at, choose, searches)
        _add_matrix(app, at, choose, searches)


def _add_experts(app: FastAPI, at: str, choose: Choose) -> None:
    @app.get(f"{at}/experts", tags=["models"], responses=openapi.problem_responses(404, 503))
    async def experts(model: Annotated[Model, Depends(choose)]) -> schemas.ExpertList:
        """What each expert holds, and what it has done."""
        return _experts(model)

    @app.get(
        f"{at}/experts/{{expert}}/classes",
        tags=["models"],
        responses=openapi.problem_responses(404, 422, 503),
        dependencies=ONCE,
    )
    async def expert_classes(
        model: Annotated[Model, Depends(choose)],
        expert: ExpertNumber,
        page: Annotated[ClassesPage, Query()],
    ) -> schemas.ExpertClasses:
        """The classes that an expert holds, in the order of their ids."""
        number = model.index.expert(expert)
        held = model.index.held(number)
        classes = held[page.offset : page.offset + page.limit]
        return schemas.ExpertClasses(
            model=model.name,
            version=model.version,
            expert=number,
            total=len(held),
            offset=page.offset,
            classes=classes.tolist(),
            labels=_labels(model, classes),
        )


def _add_samples(app: FastAPI, at: str, choose: Choose) -> None:
    @app.get(
        f"{at}/samples",
        tags=["models"],
        response_model=schemas.Samples,
        responses=openapi.problem_responses(404, 422, 503),
        dependencies=ONCE,
    )
    async def samples(
        model: Annotated[Model, Depends(choose)], page: Annotated[SamplesPage, Query()]
    ) -> Response:
        """Hidden vectors to try a model with, which its bundle carries; there may be none."""
        rows = _finite(model)
        return _json(
            model,
            total=len(rows),
            offset=page.offset,
            samples=np.ascontiguousarray(rows[page.offset : page.offset + page.limit]),
        )


def _add_classes(app: FastAPI, at: str, choose: Choose, searches: Searches) -> None:
    @app.get(
        f"{at}/classes",
        tags=["models"],
        responses=openapi.problem_responses(404, 422, 429, 503),
        dependencies=ONCE,
    )
    async def classes(
        model: Annotated[Model, Depends(choose)], asked: Annotated[Search, Query()]
    ) -> schemas.ClassList:
        """Classes by a part of their names, or by id, and the experts that hold them."""
        found = await searches.run(_search, model, asked.search, asked.limit + 1)
        return schemas.ClassList(
            model=model.name,
            version=model.version,
            classes=found[: asked.limit],
            more=len(found) > asked.limit,
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
        (found,) = await searches.run(_class_infos, model, [number])
        return schemas.OneClass(
            model=model.name,
            version=model.version,
            id=found.id,
            label=found.label,
            experts=found.experts,
        )


def _add_matrix(app: FastAPI, at: str, choose: Choose, searches: Searches) -> None:
    @app.get(
        f"{at}/matrix",
        tags=["models"],
        response_model=schemas.Matrix,
        responses=openapi.problem_responses(404, 422, 429, 503),
        dependencies=ONCE,
    )
    async def matrix(
        model: Annotated[Model, Depends(choose)], size: Annotated[MatrixSize, Query()]
    ) -> Response:
        """Which experts hold which classes, counted in as many ranges as are asked for."""
        counted = await searches.run(model.index.matrix, size.rows, size.columns, size.order)
        return _json(model, **counted._asdict())


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
    live_utilization = metrics.utilization()
    utilization: Sequence[float | None] = (
        [None] * manifest.n_experts if live_utilization is None else live_utilization.tolist()
    )
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
