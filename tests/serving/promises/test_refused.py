"""What exact, recall and rescore refuse: one table of cases, by every way to ask.

Each is refused with one sentence, and nothing is computed.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import orjson
import pytest
from click.testing import CliRunner
from helpers.fidelity_layer import a_contract, write_fidelity
from helpers.npy_bytes import npy_bytes
from helpers.server import in_thread, wait_until
from helpers.tiny_bundle import N_CLASSES, WIDTH, rows_for, write_tiny
from numpy.typing import NDArray

from service import bundle
from service.cli.main import cli
from service.client import Client, QueryRefused
from service.engine import Engine
from service.errors import QueryError
from service.http.app import create_app
from service.settings import Settings
from service.topk import SPARSE, Mode, TopK

ROWS = rows_for(0, 1)
HEAD = np.random.default_rng(0).normal(size=(N_CLASSES, WIDTH)).astype(np.float32)


class Case(NamedTuple):
    model: str
    asked: dict[str, Any]
    words: str  # which every way's sentence has


PROMISED, FAITHFUL, LEARNED, PLAIN = "promised", "faithful", "learned", "plain"
RANGE, NUMBER, ONE_OF = "recall|range", "number|float", "(?i)one of"
CASES = {
    "recall 0": Case(PROMISED, {"recall": 0}, RANGE),
    "recall negative": Case(PROMISED, {"recall": -0.5}, RANGE),
    "recall above 1": Case(PROMISED, {"recall": 1.2}, RANGE),
    "recall NaN": Case(PROMISED, {"recall": float("nan")}, "recall|valid JSON"),
    "recall a string": Case(PROMISED, {"recall": "much"}, NUMBER),
    "recall a bool": Case(PROMISED, {"recall": True}, NUMBER),
    "exact a string": Case(PROMISED, {"exact": "yes"}, "(?i)true or false|does not take a value"),
    "exact without head": Case(PLAIN, {"exact": True}, "export it with --head"),
    "rescore without head": Case(PLAIN, {"rescore": True}, "export it with --head"),
    "recall without contract": Case(FAITHFUL, {"recall": 0.9}, "dss export --calibrate"),
    "recall of learned rows": Case(LEARNED, {"recall": 0.9}, "--objective fidelity"),
    "rescore of fidelity": Case(PROMISED, {"rescore": True}, "rescore is for layers with learned"),
    "exact and recall": Case(PROMISED, {"exact": True, "recall": 0.9}, ONE_OF),
    "exact and rescore": Case(LEARNED, {"exact": True, "rescore": True}, ONE_OF),
    "recall and rescore": Case(LEARNED, {"recall": 1, "rescore": True}, ONE_OF),
    "experts with exact": Case(PROMISED, {"exact": True, "experts": 2}, "experts"),
    "experts with recall": Case(PROMISED, {"recall": 0.9, "experts": 2}, "experts"),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))

computed: list[Mode] = []


class CountedEngine(Engine):
    def topk(
        self, hidden: NDArray[np.float32], k: int, experts: int = 1, mode: Mode = SPARSE
    ) -> TopK:
        answer = super().topk(hidden, k, experts, mode)
        computed.append(mode)
        return answer


class Site(NamedTuple):
    models: Path
    http: httpx.Client


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    models = tmp_path_factory.mktemp("models")
    write_fidelity(models / PROMISED / "1", width=WIDTH, contract=a_contract(4))
    write_fidelity(models / FAITHFUL / "1", width=WIDTH)
    write_tiny(models / LEARNED / "1", head=HEAD)
    write_tiny(models / PLAIN / "1")
    app = create_app(
        Settings(models=models), engine_factory=lambda made, threads: CountedEngine(made, threads)
    )
    with in_thread(app) as http:
        wait_until(lambda: http.get("/readyz").status_code == 200)
        yield Site(models, http)


@pytest.fixture(autouse=True)
def nothing_computed(site: Site) -> Iterator[None]:
    """And the server goes on as before."""
    before = len(computed)
    yield
    assert len(computed) == before
    assert site.http.post("/models/plain/topk", json={"inputs": ROWS.tolist()}).status_code == 200


def refused(sentence: str, case: Case) -> None:
    assert re.search(case.words, sentence), sentence
    assert sentence.count(". ") == 0 and sentence[-1] == "."


@each_case
def test_json(site: Site, case: Case) -> None:
    body = json.dumps({"inputs": ROWS.tolist(), "k": 2, **case.asked})  # which writes NaN
    response = site.http.post(
        f"/models/{case.model}/topk", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == (400 if "NaN" in body else 422)
    refused(response.json()["detail"], case)


@each_case
def test_npy(site: Site, case: Case) -> None:
    fields = {name: _text(value) for name, value in case.asked.items()}
    response = site.http.post(
        f"/models/{case.model}/topk", params={"k": "2", **fields}, content=npy_bytes(ROWS),
        headers={"content-type": "application/x-npy"},
    )  # fmt: skip
    assert response.status_code == 422
    refused(response.json()["detail"], case)


def _text(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


@each_case
def test_v2(site: Site, case: Case) -> None:
    tensor = {"name": "hidden", "shape": [2, WIDTH], "datatype": "FP32", "data": ROWS.tolist()}
    body = json.dumps({"inputs": [tensor], "parameters": {"k": 2, **case.asked}})
    response = site.http.post(
        f"/v2/models/{case.model}/infer", content=body,
        headers={"content-type": "application/json"},
    )  # fmt: skip
    assert response.status_code == (400 if "NaN" in body else 422)
    refused(response.json()["error"], case)


@each_case
def test_client(site: Site, case: Case) -> None:
    with Client(str(site.http.base_url)) as client:
        with pytest.raises(QueryRefused) as failure:
            client.topk(ROWS, k=2, model=case.model, **case.asked)
        refused(str(failure.value), case)


@each_case
@pytest.mark.parametrize("served", [True, False], ids=["server", "bundle"])
def test_command(site: Site, case: Case, served: bool, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", ROWS)
    target = [str(site.http.base_url), "--model", case.model]
    if not served:
        target = [str(site.models / case.model / "1")]
    options = [part for name, value in case.asked.items() for part in _option(name, value)]
    arguments = ["query", *target, "--input", str(tmp_path / "rows.npy"), "-k", "2", *options]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code in (1, 2) and result.stdout == ""
    (said,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    refused(said.removeprefix("Error: "), case)


def _option(name: str, value: object) -> list[str]:
    if name in ("exact", "rescore"):
        return [f"--{name}" if value is True else f"--{name}={value}"]
    return [f"--{name}={value}"]


@each_case
def test_engine(site: Site, case: Case) -> None:
    engine = Engine(bundle.read(site.models / case.model / "1", head=True))
    asked = dict(case.asked)
    experts = asked.pop("experts", 1)
    for ask in (engine.check, engine.topk):
        with pytest.raises(QueryError) as failure:
            ask(ROWS, 2, experts, Mode(**asked))
        refused(str(failure.value), case)
