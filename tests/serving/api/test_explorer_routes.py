"""What is in a model: the index by hand and by brute force, the search, and their routes."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Query
from fastapi.testclient import TestClient
from helpers.server import in_thread, running, wait_until
from helpers.tiny_bundle import N_CLASSES, SIZES, rows_for, write_tiny
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from service import bundle
from service.http import problems
from service.http.app import create_app
from service.http.query import ONCE, QueryParameters, Whole, add_handler
from service.http.routes.searches import MOST_AT_ONCE, Searches, TooManySearches
from service.repository import class_index
from service.repository.class_index import ClassIndex, ClassNotFound, ExpertNotFound, Order
from service.settings import Settings

Json = dict[str, Any]

# Expert 1 holds nothing; class 4 is in two experts, classes 3 and 6 in none.
HAND = ClassIndex(7, np.array([0, 3, 3, 6]), np.array([0, 1, 4, 2, 4, 5], np.int32))


# --- the index --------------------------------------------------------------------------------


def test_an_expert_and_a_class_by_hand() -> None:
    assert HAND.held(0).tolist() == [0, 1, 4]
    assert HAND.held(1).tolist() == []
    assert HAND.experts_of([4, 3, 5, 0]) == {4: [0, 2], 3: [], 5: [2], 0: [0]}
    assert HAND.experts_of([]) == {}


def test_a_matrix_by_hand() -> None:
    whole = HAND.matrix(rows=9, columns=9, order="number")
    assert whole.experts.tolist() == [0, 1, 2]
    assert whole.expert_edges.tolist() == [0, 1, 2, 3]
    assert whole.class_edges.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert whole.counts.tolist() == [
        [1, 1, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 1, 1, 0],
    ]
    binned = HAND.matrix(rows=2, columns=3, order="class")
    assert binned.experts.tolist() == [0, 2, 1]  # the one without classes is last
    assert binned.expert_edges.tolist() == [0, 1, 3]
    assert binned.class_edges.tolist() == [0, 2, 4, 7]
    assert binned.counts.tolist() == [[2, 0, 1], [0, 1, 2]]


@st.composite
def indices(draw: st.DrawFn) -> ClassIndex:
    n_classes = draw(st.integers(1, 40))
    held = draw(
        st.lists(st.sets(st.integers(0, n_classes - 1)).map(sorted), min_size=1, max_size=12)
    )
    classes = np.array([number for one in held for number in one], np.int32)
    return ClassIndex(n_classes, np.cumsum([0, *map(len, held)]), classes)


@given(indices(), st.integers(1, 20), st.integers(1, 50), st.sampled_from(["number", "class"]))
def test_a_matrix_counts_every_held_class_once_in_its_place(
    index: ClassIndex, rows: int, columns: int, order: Order
) -> None:
    found = index.matrix(rows, columns, order)
    assert sorted(found.experts.tolist()) == list(range(index.n_experts))
    assert len(found.counts) == min(rows, index.n_experts)
    assert found.counts.shape[1] == min(columns, index.n_classes)
    for row, counts in enumerate(found.counts):
        experts = found.experts[found.expert_edges[row] : found.expert_edges[row + 1]]
        assert len(experts)
        for column, count in enumerate(counts):
            first, end = found.class_edges[column : column + 2]
            held = [((index.held(e) >= first) & (index.held(e) < end)).sum() for e in experts]
            assert count == sum(held)


@given(indices())
def test_a_class_is_in_the_experts_that_hold_it(index: ClassIndex) -> None:
    found = index.experts_of(range(index.n_classes))
    for number in range(index.n_classes):
        assert found[number] == [e for e in range(index.n_experts) if number in index.held(e)]


@pytest.mark.parametrize("text", ["3", "-1", "x", "", "1.0", "1_0", "٣", "9" * 30])
def test_what_is_no_expert_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ExpertNotFound, match="0 to 2"):
        HAND.expert(text)


@pytest.mark.parametrize("text", ["7", "-1", "x", "", " 1", "9" * 5000])
def test_what_is_no_class_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ClassNotFound, match="0 to 6") as failure:
        HAND.class_id(text)
    assert len(str(failure.value)) < 100


def test_the_index_of_a_served_model_shares_the_engines_memory(tiny: bundle.Bundle) -> None:
    from service.engine.compiled import CompiledBackend

    index = ClassIndex(tiny.manifest.n_classes, tiny.offsets, tiny.classes)
    layer = CompiledBackend(tiny)._layer
    assert any(np.shares_memory(index.classes, array) for array in layer[:-1])


# --- names ------------------------------------------------------------------------------------


def test_names_are_found_in_any_case_the_best_first() -> None:
    labels = np.array(["Concat", "cat", "dog", "Category", "bobCAT", "CAT"], dtype=object)
    assert class_index.search_labels(labels, "cat", 10) == [1, 5, 3, 0, 4]
    assert class_index.search_labels(labels, "cat", 3) == [1, 5, 3]
    assert class_index.search_labels(labels, "bird", 10) == []
    assert class_index.search_labels(labels, "", 2) == [0, 1]
    assert class_index.search_labels(np.array(["Straße"], dtype=object), "STRASSE", 1) == [0]


def test_names_are_found_beyond_the_first_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_index, "LABELS_AT_ONCE", 3)
    labels = np.array([f"name {number}" for number in range(10)], dtype=object)
    assert class_index.search_labels(labels, "NAME 7", 5) == [7]
    assert class_index.search_labels(labels, "name", 4) == [0, 1, 2, 3]


# --- work beside the event loop ---------------------------------------------------------------


def test_one_looks_at_a_time_and_few_may_wait() -> None:
    release = threading.Event()
    at_work: list[int] = []

    def work(number: int) -> int:
        at_work.append(number)
        assert release.wait(30)
        assert len(at_work) == number + 1  # nobody else has begun
        return number

    async def check() -> None:
        searches = Searches()
        waiting = [asyncio.create_task(searches.run(work, n)) for n in range(MOST_AT_ONCE)]
        await asyncio.sleep(0)  # all of them have come
        with pytest.raises(TooManySearches):
            await searches.run(work, 99)
        release.set()
        assert await asyncio.gather(*waiting) == list(range(MOST_AT_ONCE))
        assert await searches.run(lambda: "room again") == "room again"

    asyncio.run(check())


# --- parameters -------------------------------------------------------------------------------


class Parameters(QueryParameters):
    limit: Whole = Field(5, ge=1, le=10)
    search: str = Field("", max_length=3)
    order: Literal["up", "down"] = "up"


@pytest.fixture(scope="module")
def strict() -> Iterator[TestClient]:
    app = FastAPI()

    @app.get("/", dependencies=ONCE)
    def read(parameters: Annotated[Parameters, Query()]) -> Parameters:
        return parameters

    add_handler(app)
    problems.add_handlers(app)
    with TestClient(app) as client:
        yield client


def test_parameters_are_read_and_have_defaults(strict: TestClient) -> None:
    assert strict.get("/").json() == {"limit": 5, "search": "", "order": "up"}
    read = strict.get("/?order=down&limit=10&search=%C3%A4+b").json()
    assert read == {"limit": 10, "search": "ä b", "order": "down"}


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=11", "limit=1.0", "limit=1_0", "limit=", "limit=%D9%A3", "limit=-1",
              "limit=1&limit=1", "search=abcd", "order=left", "limit=%2B1"],
)  # fmt: skip
def test_a_wrong_parameter_is_refused(strict: TestClient, query: str) -> None:
    refused = strict.get(f"/?{query}")
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:dss:problem:invalid-field")
    assert query.split("=")[0] in refused.json()["detail"]


def test_an_unknown_parameter_is_refused(strict: TestClient) -> None:
    refused = strict.get("/?limitt=1")
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:dss:problem:unknown-field")
    assert "'limitt' here; there are limit, search" in refused.json()["detail"]


# --- routes -----------------------------------------------------------------------------------


def get(http: httpx.Client, path: str) -> Json:
    answer = http.get(path)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


@pytest.mark.parametrize(
    ("path", "version"),
    [("/models/tiny", 2), ("/models/tiny/versions/2", 2), ("/models/tiny/versions/1", 1)],
)
def test_every_version_is_shown(http: httpx.Client, path: str, version: int) -> None:
    for what in ("experts", "experts/0/classes", "samples", "classes", "classes/0", "matrix"):
        found = get(http, f"{path}/{what}")
        assert (found["model"], found["version"]) == ("tiny", version)


def test_the_classes_of_an_expert_in_pages(http: httpx.Client) -> None:
    whole = get(http, "/models/tiny/experts/2/classes")
    assert (whole["expert"], whole["total"], whole["offset"]) == (2, SIZES[2], 0)
    assert whole["classes"] == [0, 9, 10, 11]
    assert whole["labels"] == ["class 0", "class 9", "class 10", "class 11"]
    page = get(http, "/models/tiny/experts/2/classes?offset=1&limit=2")
    assert (page["total"], page["offset"], page["classes"]) == (4, 1, [9, 10])
    assert get(http, "/models/tiny/experts/2/classes?offset=99")["classes"] == []
    assert get(http, "/models/plain/experts/2/classes")["labels"] is None


def test_a_class_and_its_experts(http: httpx.Client) -> None:
    found = get(http, "/models/tiny/classes/0")
    assert (found["id"], found["label"], found["experts"]) == (0, "class 0", [0, 2])
    assert get(http, "/models/plain/classes/7") == {
        "model": "plain", "version": 1, "id": 7, "label": None, "experts": [1],
    }  # fmt: skip


def test_classes_are_found_by_name_and_by_id(http: httpx.Client) -> None:
    def ids(path: str) -> list[int]:
        return [found["id"] for found in get(http, path)["classes"]]

    assert ids("/models/tiny/classes?search=CLASS%201") == [1, 10, 11]
    assert ids("/models/tiny/classes?search=1") == [1, 10, 11]  # the id, then the names
    assert ids("/models/plain/classes?search=11") == [11]
    assert ids("/models/plain/classes?search=class") == []
    found = get(http, "/models/tiny/classes?search=class&limit=2")
    assert ([one["id"] for one in found["classes"]], found["more"]) == ([0, 1], True)
    assert get(http, "/models/tiny/classes?limit=100")["more"] is False
    assert len(ids("/models/plain/classes?limit=100")) == N_CLASSES


def test_samples_can_be_asked_as_they_come(http: httpx.Client) -> None:
    found = get(http, "/models/tiny/samples")
    assert (found["total"], len(found["samples"])) == (2, 2)
    answer = http.post("/models/tiny/topk", json={"inputs": found["samples"], "k": 1})
    assert answer.status_code == 200
    last = get(http, "/models/tiny/samples?offset=1&limit=1")
    assert last["samples"] == found["samples"][1:]


def test_the_matrix_of_a_model(http: httpx.Client) -> None:
    found = get(http, "/models/tiny/matrix?columns=3")
    assert found["experts"] == [0, 1, 2]
    assert found["class_edges"] == [0, 4, 8, 12]
    assert found["counts"] == [[4, 1, 0], [0, 3, 1], [1, 0, 3]]


@pytest.mark.parametrize(
    ("status", "path"),
    [
        (404, "/models/none/matrix"),
        (404, "/models/tiny/versions/9/samples"),
        (404, "/models/tiny/versions/3/experts"),
        (404, "/models/tiny/experts/3/classes"),
        (404, "/models/tiny/experts/x/classes"),
        (404, "/models/tiny/classes/12"),
        (404, "/models/tiny/classes/x"),
        (422, "/models/tiny/matrix?columns=0"),
        (422, "/models/tiny/matrix?order=size"),
        (422, "/models/tiny/matrix?colums=3"),
        (422, "/models/tiny/samples?limit=65"),
        (422, "/models/tiny/classes?search=" + "x" * 257),
        (422, "/models/tiny/experts/0/classes?limit=1&limit=2"),
    ],
)
def test_what_is_wrong_is_a_problem(http: httpx.Client, status: int, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"].endswith(".")


def test_a_missing_expert_and_class_have_names(http: httpx.Client) -> None:
    for path, slug in (
        ("experts/9/classes", "expert-not-found"),
        ("classes/99", "class-not-found"),
    ):
        assert http.get(f"/models/tiny/{path}").json()["type"] == f"urn:dss:problem:{slug}"


# --- a model that is loaded with samples that nobody can ask, and without any -----------------


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("odd")
    for name, samples in (
        ("none", None),
        ("some", np.array([[1, 2], [np.nan, 0], [3, 4]], np.float32)),
    ):
        bundle.write(
            folder / "models" / name / "1",
            gate=np.eye(2, dtype=np.float32),
            weight=np.eye(2, dtype=np.float32),
            offsets=np.array([0, 1, 2]),
            classes=np.array([0, 1], np.int32),
            n_classes=2,
            training=bundle.TrainingFacts(utilization=[0.5, 0.5], flops_speedup=1.0),
            samples=samples,
        )
    with (
        running(folder / "models", folder / "log") as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def test_only_samples_that_can_be_asked_are_shown(odd: httpx.Client) -> None:
    assert get(odd, "/models/none/samples")["samples"] == []
    found = get(odd, "/models/some/samples")
    assert (found["total"], found["samples"]) == (2, [[1.0, 2.0], [3.0, 4.0]])


def test_a_version_that_is_let_go_takes_its_index_along(tmp_path: Path) -> None:
    """Whoever looks has the version it began with; what is asked afterwards is the new one."""
    models = tmp_path / "models"
    write_tiny(models / "tiny" / "1", seed=1)
    with (
        running(models, tmp_path / "log", env={"DSS_REPOSITORY__POLL_SECONDS": "0.05"}) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        assert get(client, "/models/tiny/matrix")["version"] == 1
        write_tiny(models / "tiny" / "2", seed=2, labels=False)
        server.wait_for("/models/tiny/versions/2/matrix")
        assert get(client, "/models/tiny/classes/0")["label"] is None
        assert get(client, "/models/tiny/versions/1/classes/0")["label"] == "class 0"


def test_top_k_is_answered_while_somebody_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, release = threading.Event(), threading.Event()

    def slow(*_: object) -> list[int]:
        begun.set()
        assert release.wait(30)
        return []

    monkeypatch.setattr(class_index, "search_labels", slow)
    write_tiny(tmp_path / "models" / "tiny" / "1")
    app = create_app(Settings(models=tmp_path / "models"))
    with in_thread(app) as client, ThreadPoolExecutor() as threads:
        wait_until(lambda: client.get("/startupz").status_code == 200)
        searching = threads.submit(client.get, "/models/tiny/classes?search=x")
        assert begun.wait(30)
        assert client.post("/topk", json={"inputs": rows_for(0).tolist()}).status_code == 200
        assert not searching.done()
        release.set()
        assert searching.result().json()["classes"] == []
