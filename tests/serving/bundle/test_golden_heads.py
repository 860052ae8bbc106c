"""Heads of earlier and of this version; the golden files are never written again."""

import json

import numpy as np
import pytest
from helpers.paths import GOLDEN

from service import bundle
from service.engine import Engine
from service.engine.verification import verify_answers
from service.errors import NoHead
from service.topk import Mode

EXACT = Mode(exact=True)


def test_a_head_of_version_3_is_read() -> None:
    """Stored by column: answers can be compared with it, but not be exact."""
    made = bundle.read(GOLDEN / "head3", head=True)
    said = json.loads((GOLDEN / "head3.json").read_text())
    assert made.manifest.format_version == 3 and made.manifest.objective == "accuracy"
    assert made.head is not None and made.samples is not None and made.rows is None
    for backend in ("compiled", "onnx"):
        answer = Engine(made.head, backend=backend).topk(made.samples, 5)  # type: ignore[arg-type]
        assert answer.classes.tolist() == said["classes"]
        np.testing.assert_allclose(answer.log_probs, said["log_probs"], atol=1e-4)
    engine = Engine(made)
    assert not engine.can_exact
    with pytest.raises(NoHead, match="export it with --head"):
        engine.topk(made.samples, 1, mode=EXACT)
    verify_answers(made, engine)


@pytest.mark.parametrize("backend", ["compiled", "onnx"])
def test_a_fidelity_bundle_of_version_4_is_read(backend: str) -> None:
    made = bundle.read(GOLDEN / "fidelity4")
    said = json.loads((GOLDEN / "fidelity4.json").read_text())
    assert made.manifest.format_version == 4 and made.samples is not None
    engine = Engine(made, backend=backend)  # type: ignore[arg-type]
    for name, answer in (
        ("sparse", engine.topk(made.samples, 5)),
        ("exact", engine.topk(made.samples, 5, mode=EXACT)),
        ("recall", engine.topk(made.samples, 5, mode=Mode(recall=0.9))),
    ):
        assert answer.classes.tolist() == said[name]["classes"]
        np.testing.assert_allclose(answer.log_probs, said[name]["log_probs"], atol=0.02)
        if answer.rungs is not None:
            assert answer.rungs.tolist() == said[name]["rungs"]
    verify_answers(made, engine)


def test_an_accuracy_bundle_of_version_4_is_read() -> None:
    made = bundle.read(GOLDEN / "head4", head=True)
    said = json.loads((GOLDEN / "head4.json").read_text())
    assert made.manifest.objective == "accuracy" and made.samples is not None
    answer = Engine(made).topk(made.samples, 5, mode=EXACT)
    assert answer.classes.tolist() == said["classes"]
    verify_answers(made, Engine(made))
