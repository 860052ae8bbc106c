"""Both clients against real servers: their answers are the engine's, bit for bit."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.clients import KINDS
from helpers.fake_engine import FakeEngine
from helpers.server import Running, free_port, in_thread, running, wait_until
from helpers.tiny_bundle import N_CLASSES, SIZES, WIDTH, rows_for, write_tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from serving.api.test_access import QUERY, UNKNOWN, write_keys
from serving.api.test_tls import PASSWORD, Authority, flags

from service import bundle
from service.client import (
    Answer,
    AsyncClient,
    Client,
    ClientError,
    DeadlineExceeded,
    ExpertInfo,
    ModelNotFound,
    NotAuthorized,
    NotTrusted,
    Overloaded,
    QueryRefused,
)
from service.engine import Engine
from service.http.app import Application, create_app
from service.settings import EngineSettings, Limits, Queue, Settings

ROWS = rows_for(0, 1, 2)
Connect = Callable[..., Any]


@pytest.fixture(params=list(KINDS))
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes a client of either kind, which is closed at the end."""
    made: list[Any] = []

    def made_for(url: str, **named: Any) -> Any:  # noqa: ANN401
        made.append(KINDS[request.param](url, **named))
        return made[-1]

    yield made_for
    for client in made:
        client.close()


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


def test_parts_become_as_small_as_a_server_wants(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.client.async_client.PARTS_AT_ONCE", 1)  # its queue is as small
    limits = Limits(max_rows=300, max_answers=500, max_body_bytes=2000)
    with served(tmp_path, FakeEngine(WIDTH, 10**6), limits=limits) as (_, url):
        client = connect(url)
        for k in (1, 3):
            rows = np.zeros((1000, WIDTH), np.float32)
            rows[:, 0] = np.arange(1000)
            found = client.topk(rows, k=k, timeout=60)
            assert found.classes[:, 0].tolist() == list(range(1000))


@contextmanager
def served(folder: Path, engine: FakeEngine, **more: Any) -> Iterator[tuple[Application, str]]:
    """A server in this process with limits and an engine of a test's choice, and its URL."""
    write_tiny(folder / "tiny" / "1", labels=False)
    made = Settings(models=folder, engine=EngineSettings(stuck_seconds=60), **more)
    app = create_app(made, engine_factory=lambda *_: engine)
    with in_thread(app) as http:
        wait_until(lambda: http.get("/readyz").status_code == 200)
        try:
            yield app, str(http.base_url).rstrip("/")
        finally:
            engine.release.set()


# --- sharing ---------------------------------------------------------------------------------


def test_threads_share_a_client(server: Running, engines: dict[int, Engine]) -> None:
    rows = np.random.default_rng(1).normal(size=(16, 25, 3, WIDTH)).astype(np.float32)

    def ask(client: Client, mine: NDArray[np.float32]) -> None:
        for batch in mine:
            assert_equal(client.topk(batch, k=3), engines[2], batch, 3, 1)

    with Client(server.url) as client, ThreadPoolExecutor(16) as threads:
        list(threads.map(ask, [client] * 16, rows))
        assert len(client._sockets._idle) <= 16


def test_tasks_share_a_client(server: Running, engines: dict[int, Engine]) -> None:
    rows = np.random.default_rng(2).normal(size=(300, 2, WIDTH)).astype(np.float32)

    async def ask() -> list[Answer]:
        async with AsyncClient(server.url) as client:
            found = await asyncio.gather(*(client.topk(batch, k=3) for batch in rows))
            assert len(client._streams._idle) <= 100
            return found

    for found, batch in zip(asyncio.run(ask()), rows, strict=True):
        assert_equal(found, engines[2], batch, 3, 1)


# --- overload, restarts, deadlines -----------------------------------------------------------


def occupied(app: Application, engine: FakeEngine, url: str, stack: ExitStack) -> None:
    """The engine computes one row and another waits: there is no room for a third."""
    engine.hold()
    queue = app.state.service.repository.get().batcher
    waiting = Client(url, timeout=60)
    stack.callback(waiting.close)
    for ready in (lambda: engine.entered.is_set(), lambda: queue.queued_rows == 1):
        thread = threading.Thread(target=waiting.topk, args=([1.0] * WIDTH, 1))
        thread.start()
        stack.callback(thread.join)
        stack.callback(engine.release.set)
        wait_until(ready)


def test_an_overloaded_server_is_asked_again(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(WIDTH)
    pauses: list[float] = []
    tight = {"limits": Limits(max_rows=1), "queue": Queue(max_rows=1)}
    with served(tmp_path, engine, **tight) as (app, url), ExitStack() as stack:
        queue = app.state.service.repository.get().batcher

        def pass_by(seconds: float) -> None:
            """Instead of sleeping: what was in the way goes."""
            pauses.append(seconds)
            engine.release.set()
            wait_until(lambda: queue.queued_rows == 0)

        async def pass_by_soon(seconds: float) -> None:
            await asyncio.to_thread(pass_by, seconds)

        monkeypatch.setattr("service.client.client.sleep", pass_by)
        monkeypatch.setattr("service.client.async_client.sleep", pass_by_soon)
        occupied(app, engine, url, stack)
        with pytest.raises(Overloaded) as failure:
            connect(url, retries=0).topk([5.0] * WIDTH, 1)
        assert (failure.value.status, failure.value.tries) == (429, 1)
        assert connect(url).topk([5.0] * WIDTH, 1).classes.tolist() == [[5]]
        assert 1.0 <= pauses[0] <= 1.2  # Retry-After, and a share of chance


def test_a_server_that_starts_again_is_waited_for(
    connect: Connect, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    with ExitStack() as stack:

        def start(seconds: float) -> None:
            """Instead of sleeping."""
            assert 0.0 <= seconds <= 0.2
            stack.enter_context(running(models, tmp_path / "log", port=port))

        async def start_soon(seconds: float) -> None:
            await asyncio.to_thread(start, seconds)

        monkeypatch.setattr("service.client.client.sleep", start)
        monkeypatch.setattr("service.client.async_client.sleep", start_soon)
        client = connect(f"http://127.0.0.1:{port}", timeout=60, retries=1)
        assert client.ready() is False
        assert client.topk(ROWS, model="tiny", k=2).classes.shape == (3, 2)
        assert client.ready() is True


def test_the_server_stops_when_nobody_waits_any_more(connect: Connect, tmp_path: Path) -> None:
    engine = FakeEngine(WIDTH)
    with served(tmp_path, engine) as (app, url), ExitStack() as stack:
        occupied(app, engine, url, stack)
        queue = app.state.service.repository.get().batcher
        under_way = len(engine.calls)
        with pytest.raises(DeadlineExceeded):
            connect(url, timeout=0.1).topk([5.0] * WIDTH, 1)
        wait_until(lambda: queue.queued_rows == 1)
        engine.release.set()
        wait_until(lambda: queue.queued_rows == 0)
        assert connect(url).topk([6.0] * WIDTH, 1).classes.tolist() == [[6]]
        # The one that waited and the last, a row each: the late one was in neither call.
        assert engine.calls[under_way:] == [(1, 1, 1)] * 2


# --- keys and TLS ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def guarded(
    models: Path, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Over TLS, and with keys."""
    folder = tmp_path_factory.mktemp("guarded")
    authority.write(folder)
    write_keys(folder / "keys.toml", query="query", admin="admin")
    with running(
        models,
        folder / "log",
        *flags(folder),
        *("--default-model", "tiny", "--keys-file", str(folder / "keys.toml")),
        env={"DSS_TLS__KEY_PASSWORD": PASSWORD},
        tls=authority.client(),
    ) as server:
        yield server


def test_keys_and_tls(
    connect: Connect, guarded: Running, authority: Authority, tmp_path: Path
) -> None:
    trusted = authority.write_ca(tmp_path)
    for verify in (trusted, str(trusted), authority.client(), False):
        client = connect(guarded.url, api_key=QUERY, verify=verify)
        for _ in range(2):
            assert client.topk(ROWS, k=2).classes.shape == (3, 2)
    open_to_all = connect(guarded.url, verify=trusted)
    assert open_to_all.ready() is True
    with pytest.raises(NotAuthorized, match="api_key=") as failure:
        open_to_all.models()
    assert failure.value.status == 401
    with pytest.raises(NotAuthorized, match="does not know"):
        connect(guarded.url, verify=trusted, api_key=UNKNOWN).topk(ROWS)
    with pytest.raises(NotTrusted, match="verify="):
        connect(guarded.url).ready()
    with pytest.raises(ClientError):
        connect(guarded.url.replace("https", "http"), retries=0).topk(ROWS)


def test_no_tls_where_none_is_spoken(connect: Connect, server: Running) -> None:
    with pytest.raises(NotTrusted, match="No TLS"):
        connect(server.url.replace("http", "https")).topk(ROWS)


# --- what it needs ---------------------------------------------------------------------------


def test_it_imports_nothing_of_the_server() -> None:
    heavy = {
        "fastapi", "starlette", "pydantic", "onnx", "onnxruntime", "numba", "prometheus_client",
        "uvicorn", "torch", "trainer", "click",
    }  # fmt: skip
    code = (
        "import sys, service.client\n"
        f"print({heavy!r} & {{name.split('.')[0] for name in sys.modules}},"
        " sorted(name for name in sys.modules if name.startswith('service.')"
        " and not name.startswith('service.client')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set() ['service.errors', 'service.npy']\n"


def test_users_see_its_types(tmp_path: Path) -> None:
    """The package is marked as typed; a wrong use is found before it runs."""
    user = tmp_path / "user.py"
    user.write_text(
        "from service.client import Client\n"
        "with Client('http://localhost') as client:\n"
        "    reveal_type(client.topk([[1.0]]).classes)\n"
        "    client.topk([[1.0]], k='ten')\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(user)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "signedinteger" in run.stdout
    assert 'incompatible type "str"' in run.stdout
    assert run.stdout.count("error:") == 1
