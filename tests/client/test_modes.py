"""Both clients ask for exact answers and promised recall, and read how each row was answered."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.client.clients import Connect
from helpers.client.played_core import Play
from helpers.fake_engine import FakeEngine
from helpers.serving.promises import EASY, HARD, serving_promises
from helpers.tiny_bundle import WIDTH

from service.client import ContractInfo, QueryRefused, model_info
from service.settings import Limits
from service.topk import SPARSE, Mode

ROWS = np.array([EASY, HARD], np.float32)


@pytest.mark.parametrize("labels", [False, True])  # .npy and JSON
def test_how_each_row_was_answered(connect: Connect, tmp_path: Path, labels: bool) -> None:
    with serving_promises(tmp_path) as made:
        client = connect(str(made.http.base_url))

        def ask(**asked: Any) -> tuple[Any, ...]:
            found = client.topk(ROWS, k=2, labels=labels, **asked)
            assert found.classes.tolist() == [[1, 2], [2, 3]]
            how = [None if a is None else a.tolist() for a in (found.rungs, found.searched)]
            return (*how, found.promise)

        assert ask() == (None, None, None)
        assert ask(experts=2) == (None, None, None)
        assert ask(exact=True) == (["exact", "exact"], [0, 0], None)
        assert ask(recall=0.9) == (["sparse", "escalated"], [1, 1], "kept")
        assert ask(rescore=True, experts=3) == (["sparse", "sparse"], [3, 3], None)
        made.shift()
        assert ask(recall=0.9) == (["sparse", "escalated"], [1, 1], "withdrawn")
        assert made.engine.modes[-1] == Mode(recall=0.9)


def test_what_does_not_go_together_is_the_servers_to_say(connect: Connect, tmp_path: Path) -> None:
    with serving_promises(tmp_path) as made:
        client = connect(str(made.http.base_url))
        before = len(made.engine.calls)
        for asked, words in (
            ({"exact": True, "recall": 0.9}, "Only one of"),
            ({"recall": 1.5}, "recall is 1.5; a share above 0"),
            ({"recall": float("nan")}, "'recall' must be a number"),
            ({"exact": True, "experts": 2}, "'experts' goes with neither"),
            ({"recall": "much"}, "recall must be a number, not 'much'"),
        ):
            with pytest.raises(QueryRefused, match=words):
                client.topk(ROWS, **asked)
        assert len(made.engine.calls) == before


def test_a_refused_promise_is_named(connect: Connect, tmp_path: Path) -> None:
    with serving_promises(tmp_path, on_drift="refuse") as made:
        made.shift()
        with pytest.raises(QueryRefused, match="has drifted") as failure:
            connect(str(made.http.base_url)).topk(ROWS, recall=0.9)
        assert failure.value.status == 409


def test_without_experts_the_server_may_promise(connect: Connect, tmp_path: Path) -> None:
    with serving_promises(tmp_path, recall=0.9) as made:
        client = connect(str(made.http.base_url))
        assert client.topk(ROWS).promise == "kept"
        assert client.topk(ROWS, experts=1).promise is None
        assert made.engine.modes[-1] == SPARSE


def test_parts_are_as_small_as_scans_need(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.client.async_client.PARTS_AT_ONCE", 1)
    with serving_promises(tmp_path, limits=Limits(max_scores=3000)) as made:
        client = connect(str(made.http.base_url))
        found = client.topk(np.tile(ROWS, (100, 1)), k=2, recall=0.9)
        assert found.rungs.tolist() == ["sparse", "escalated"] * 100
        assert found.searched.tolist() == [1, 1] * 100
        assert found.promise == "kept"
        assert max(rows for rows, *_ in made.engine.calls) <= 32  # 29 rows may be scanned
        before = made.counted("dss_requests_total")
        client.topk(np.tile(ROWS, (100, 1)), k=2)
        assert made.counted("dss_requests_total") == before + 1, "plain rows are sent as before"


def test_what_a_model_can_is_told(connect: Connect, tmp_path: Path) -> None:
    with serving_promises(tmp_path) as made:
        (version,) = connect(str(made.http.base_url)).model("tiny").versions
        assert (version.objective, version.can_exact) == ("accuracy", True)
        assert version.contract == ContractInfo(rows=1000, levels=(0.9, 0.99), ks=(10,))


def test_an_older_server_says_nothing_of_it(tmp_path: Path) -> None:
    with serving_promises(tmp_path, FakeEngine(WIDTH)) as made:
        document = made.http.get("/models/tiny").json()
    for name in ("objective", "can_exact", "contract"):
        del document["versions"][0][name]
    (version,) = model_info.model(document).versions
    assert (version.objective, version.can_exact, version.contract) == ("accuracy", False, None)


@pytest.mark.parametrize(
    ("asked", "query"),
    [
        ({}, "/topk?k=2"),
        ({"k": None}, "/topk"),
        ({"k": None, "exact": True}, "/topk?exact=true"),
        ({"experts": 2, "rescore": True}, "/topk?k=2&experts=2&rescore=true"),
        ({"recall": 0.99}, "/topk?k=2&recall=0.99"),
        ({"recall": 1}, "/topk?k=2&recall=1.0"),
    ],
)
def test_what_is_sent(asked: dict[str, Any], query: str) -> None:
    played = Play([_stop])
    with pytest.raises(Stop):
        played.topk(**{"experts": None, **asked})
    assert played.heads()[0].startswith(f"POST {query} HTTP/1.1\r\n")


class Stop(Exception):
    pass


def _stop(_: object) -> Any:  # noqa: ANN401
    raise Stop
