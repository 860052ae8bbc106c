"""kserve's own client, by a Python that has it: `make kserve`, or KSERVE_PYTHON=path pytest."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.paths import TESTS
from helpers.server import Running
from helpers.tiny_bundle import rows_for

from service import bundle
from service.engine import Engine

GIVEN = os.environ.get("KSERVE_PYTHON")
ROWS = rows_for(0, 1, 2)

pytestmark = pytest.mark.skipif(
    GIVEN is None and find_spec("kserve") is None,
    reason="kserve needs older libraries than this project; `make kserve` gives it its own",
)


@pytest.fixture(scope="module")
def found(server: Running) -> dict[str, Any]:
    script = TESTS / "helpers" / "deployment" / "kserve_client.py"
    told = json.dumps({"url": server.url, "rows": ROWS.tolist()})
    ran = subprocess.run(
        [GIVEN or sys.executable, script], input=told, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    answered: dict[str, Any] = json.loads(ran.stdout)
    return answered


def test_health(found: dict[str, Any]) -> None:
    assert (found["live"], found["ready"], found["model ready"]) == (True, True, True)
    assert found["nobody ready"] is False


@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("binary_in", [True, False])
def test_inference_in_all_mixes(
    found: dict[str, Any], models: Path, binary_in: bool, binary_out: bool
) -> None:
    answer = found[f"infer {binary_in} {binary_out}"]
    assert (answer["id"], answer["model"]) == ("mine", "tiny")
    expected = Engine(bundle.read(models / "tiny" / "2")).topk(ROWS, 4, 2)
    assert list(answer["outputs"]) == ["classes", "log_probs", "experts", "gates"]
    for name, values in answer["outputs"].items():
        np.testing.assert_allclose(values, getattr(expected, name), rtol=1e-5)
        assert answer["dtypes"][name] == str(getattr(expected, name).dtype)


def test_halves_and_chosen_outputs(found: dict[str, Any]) -> None:
    assert found["half"] == found["infer True True"]["outputs"]["classes"]
    assert found["chosen"] == ["gates"]


def test_an_error_is_said(found: dict[str, Any]) -> None:
    status, message = found["refused"]
    assert status == 422
    assert "Inputs have shape [3, 3]" in message
