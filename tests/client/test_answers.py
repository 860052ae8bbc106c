"""Both clients against a real server: their answers are the engine's, bit for bit."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.client.clients import KINDS, Connect
from helpers.server import Running
from helpers.tiny_bundle import N_CLASSES, SIZES, WIDTH, rows_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from service import bundle
from service.client import (
    Answer,
    AsyncClient,
    Client,
    ClientError,
    ExpertInfo,
    ModelNotFound,
    QueryRefused,
)
from service.engine import Engine

ROWS = rows_for(0, 1, 2)


@pytest.fixture(scope="module")
def engines(models: Path) -> dict[int, Engine]:
    """Of `tiny`, by version."""
    return {version: Engine(bundle.read(models / "tiny" / str(version))) for version in (1, 2)}


def assert_equal(found: Answer, engine: Engine, rows: NDArray[Any], k: int, experts: int) -> None:
    expected = engine.topk(rows.astype(np.float32), k, experts)
    for name, dtype in (("classes", "i8"), ("log_probs", "f4"), ("experts", "i8"), ("gates", "f4")):
        array = getattr(found, name)
        assert array.dtype == np.dtype(dtype)
        assert array.flags.aligned and array.flags.writeable and array.flags.c_contiguous
        np.testing.assert_array_equal(array, getattr(expected, name))


# --- answers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=list(KINDS))
def shared(server: Running, request: pytest.FixtureRequest) -> Iterator[Any]:
    client = KINDS[request.param](server.url)
    yield client
    client.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hidden=arrays.arrays(
        st.sampled_from([np.float32, np.float16, np.float64, np.int32]),
        st.tuples(st.integers(1, 40), st.just(WIDTH)),
        elements=st.integers(-64, 64),  # which all of them hold exactly
    ),
    k=st.integers(1, 4),
    experts=st.integers(1, 3),
    labels=st.booleans(),
)
def test_answers_are_the_engines(
    shared: Any,  # noqa: ANN401
    engines: dict[int, Engine],
    hidden: NDArray[Any],
    k: int,
    experts: int,
    labels: bool,
) -> None:
    found = shared.topk(
        hidden / 16 if hidden.dtype != np.int32 else hidden, k, experts, labels=labels
    )
    rows = hidden / 16 if hidden.dtype != np.int32 else hidden
    assert_equal(found, engines[2], rows, k, experts)
    assert (found.model, found.version) == ("tiny", 2)
    if labels:
        assert found.labels == [[f"class {c}" for c in row] for row in found.classes.tolist()]
    else:
        assert found.labels is None


def test_rows_may_be_anything_that_numpy_reads(connect: Connect, server: Running) -> None:
    torch = pytest.importorskip("torch")
    client = connect(server.url)
    expected = client.topk(ROWS, k=3)
    spread = np.zeros((WIDTH, 3), np.float32)
    spread[:] = ROWS.T
    forms = [
        ROWS.tolist(),
        torch.from_numpy(ROWS),
        np.asfortranarray(ROWS),
        spread.T,
        ROWS.astype(">f4"),
        np.repeat(ROWS, 2, axis=0)[::2],
    ]
    for form in forms:
        found = client.topk(form, k=3)
        np.testing.assert_array_equal(found.classes, expected.classes)
        np.testing.assert_array_equal(found.log_probs, expected.log_probs)
    with pytest.raises(QueryRefused, match="detach"):
        client.topk(torch.ones((1, WIDTH), requires_grad=True))
    with pytest.raises(QueryRefused, match="cannot be read as an array"):
        client.topk(torch.ones((1, WIDTH), dtype=torch.bfloat16))


def test_a_lone_row_is_a_batch_of_one(connect: Connect, server: Running) -> None:
    found = connect(server.url).topk(ROWS[0], k=3, labels=True)
    assert found.classes.shape == found.log_probs.shape == (1, 3)
    assert found.experts.shape == found.gates.shape == (1,)
    assert [len(row) for row in found.labels] == [3]


def test_versions_models_and_usual_k(
    connect: Connect, server: Running, engines: dict[int, Engine]
) -> None:
    client = connect(server.url)
    first = client.topk(ROWS, 3, model="tiny", version=1)
    assert_equal(first, engines[1], ROWS, 3, 1)
    assert first.version == 1
    assert client.topk(ROWS, None).classes.shape == (3, min(10, N_CLASSES))
    plain = connect(server.url, model="plain", version="default").topk(ROWS, 3, labels=True)
    assert (plain.model, plain.version, plain.labels) == ("plain", 1, None)


def test_facts(connect: Connect, server: Running, models: Path) -> None:
    client = connect(server.url)
    assert client.ready() is True
    plain, tiny = sorted(client.models(), key=lambda model: str(model.name))
    assert (plain.name, plain.default, plain.versions[0].labels) == ("plain", False, False)
    assert (tiny.name, tiny.default, tiny.version) == ("tiny", True, 2)
    assert client.model("tiny").versions[0].hidden_size == WIDTH
    assert client.model().name == "tiny"  # the server's default
    assert connect(server.url, model="plain").model().name == "plain"
    assert [version.version for version in tiny.refused] == [3]
    assert {(found.version, found.state) for found in tiny.found} == {
        (1, "loaded"), (2, "loaded"), (3, "refused"),
    }  # fmt: skip
    client.topk(ROWS)
    experts = client.experts("tiny")
    assert all(isinstance(expert, ExpertInfo) for expert in experts)
    assert [(expert.expert, expert.classes) for expert in experts] == list(enumerate(SIZES))
    assert all(expert.utilization is not None for expert in client.experts())
    for version in (1, 2):
        samples = bundle.read(models / "tiny" / str(version)).samples
        found = connect(server.url, model="tiny", version=version).samples()
        assert found.dtype == np.float32 and np.array_equal(found, samples)


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        ({"hidden": np.zeros((1, 3))}, QueryRefused, "expected"),
        ({"hidden": [[np.nan] * WIDTH]}, QueryRefused, r"inputs\[0\]\[0\] is a NaN"),
        ({"hidden": [[1e300] * WIDTH]}, QueryRefused, r"inputs\[0\]\[0\] is a NaN or an infinity"),
        ({"k": 10_000}, QueryRefused, "k is 10000"),
        ({"experts": 99}, QueryRefused, "expert"),
        ({"model": "nobody"}, ModelNotFound, "nobody"),
        ({"model": "a/b"}, ClientError, "no such path"),
        ({"model": "tiny", "version": 9}, ModelNotFound, "9"),
        ({"model": "tiny", "version": "canary"}, ModelNotFound, "canary"),
    ],
)
def test_what_a_server_refuses(
    connect: Connect, server: Running, call: dict[str, Any], kind: type[ClientError], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence) as failure:
        connect(server.url).topk(**{"hidden": ROWS, **call})
    assert (failure.value.status or 0) >= 400
    assert failure.value.request_id


# --- many rows -------------------------------------------------------------------------------


def test_parts_are_the_whole(connect: Connect, server: Running, engines: dict[int, Engine]) -> None:
    """A hundred thousand rows: more than a request may hold, and more answers."""
    rows = np.random.default_rng(0).normal(size=(100_000, WIDTH)).astype(np.float32)
    client = connect(server.url)
    found = client.topk(rows, k=2, timeout=60)
    assert_equal(found, engines[2], rows, 2, 1)
    some = client.topk(rows[:5000], k=4, labels=True, timeout=60)
    assert some.labels == [[f"class {c}" for c in row] for row in some.classes.tolist()]


# --- sharing ---------------------------------------------------------------------------------


def test_threads_share_a_client(server: Running, engines: dict[int, Engine]) -> None:
    rows = np.random.default_rng(1).normal(size=(16, 25, 3, WIDTH)).astype(np.float32)

    def ask(client: Client, mine: NDArray[np.float32]) -> None:
        for batch in mine:
            assert_equal(client.topk(batch, k=3), engines[2], batch, 3, 1)

    with Client(server.url) as client, ThreadPoolExecutor(16) as threads:
        list(threads.map(ask, [client] * 16, rows))
        assert len(client._connections._idle) <= 16


def test_tasks_share_a_client(server: Running, engines: dict[int, Engine]) -> None:
    rows = np.random.default_rng(2).normal(size=(300, 2, WIDTH)).astype(np.float32)

    async def ask() -> list[Answer]:
        async with AsyncClient(server.url) as client:
            found = await asyncio.gather(*(client.topk(batch, k=3) for batch in rows))
            assert len(client._connections._idle) <= 100
            return found

    for found, batch in zip(asyncio.run(ask()), rows, strict=True):
        assert_equal(found, engines[2], batch, 3, 1)
