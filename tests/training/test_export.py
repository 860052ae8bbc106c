"""From a run to a bundle, and the refusals on the way."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny_bundle import with_classes

from service import bundle
from service.bundle.format import Precision
from service.engine import Engine
from service.errors import BundleExists, LabelsWrong, ParityFailed
from trainer.data import run_folder
from trainer.data.arrays import ClassesDisagree, Head, WidthsDisagree
from trainer.export import export as exporting
from trainer.export import parity
from trainer.export.export import export
from trainer.export.parity import check_parity
from trainer.tasks import synthetic
from trainer.training.config import make_config


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"n_experts": 3, "epochs": 12, "items_per_class": 20, "batch_size": 20}
    config = make_config(synthetic.SyntheticConfig, settings)
    folder = tmp_path_factory.mktemp("runs") / "finished"
    synthetic.run(synthetic.parse_size("3x4"), config, folder, baseline=False)
    return folder


def test_the_service_answers_as_the_layer_does(finished: Path, tmp_path: Path) -> None:
    written = export(finished, tmp_path / "models" / "small" / "1")
    layer = run_folder.load_layer(finished)
    hidden = np.load(finished / run_folder.HIDDEN)
    answer = Engine(written).topk(hidden, 3)
    expected = layer.topk(torch.from_numpy(hidden), 3)
    np.testing.assert_allclose(answer.log_probs, expected.log_probs.numpy(), atol=1e-5)
    assert written.labels is not None and written.labels[5] == "super 1 / sub 1"
    summary = json.loads((finished / run_folder.SUMMARY).read_text())
    facts = written.manifest.training.model_dump()
    assert facts["accuracy"] == summary["accuracy"] and facts["seed"] == summary["seed"]
    assert "seconds" not in facts
    assert [p.name for p in (tmp_path / "models" / "small").iterdir()] == ["1"]


def test_a_head_is_shipped_with_what_a_server_compares_traffic_with(
    finished: Path, tmp_path: Path
) -> None:
    layer, hidden = run_folder.load_layer(finished), np.load(finished / run_folder.HIDDEN)
    own = np.zeros((layer.n_classes, hidden.shape[1]), np.float32)
    own[layer.class_of_row.numpy()] = layer.weight.numpy()
    written = export(finished, tmp_path / "1", head=Head(own, None))
    facts = written.manifest.training
    assert written.head is not None and facts.gates is not None and facts.head_recall is not None
    engine, full = Engine(written), Engine(written.head)
    served, best = engine.topk(hidden, 10), full.topk(hidden, 10)
    for at in (1, 5, 10):
        same = served.classes[:, :at, None] == best.classes[:, None, :at]
        assert facts.head_recall[str(at)] == pytest.approx(same.sum() / (at * len(hidden)))  # type: ignore[index]
    bins = np.searchsorted(facts.gates.edges, served.gates)
    shares = np.bincount(bins, minlength=len(facts.gates.shares)) / len(hidden)
    np.testing.assert_allclose(facts.gates.shares, shares, atol=1e-12)
    assert all(share > 0 for share in facts.gates.shares)


def test_a_head_of_another_shape_is_refused(finished: Path, tmp_path: Path) -> None:
    layer = run_folder.load_layer(finished)
    width = layer.gate.shape[1]
    for shape, expected in (((5, width), ClassesDisagree), ((layer.n_classes, 3), WidthsDisagree)):
        with pytest.raises(expected):
            export(finished, tmp_path / "1", head=Head(np.ones(shape, np.float32), None))
    assert not (tmp_path / "1").exists()


def test_a_mismatch_is_refused_and_nothing_is_left(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights written are not those of the layer: as a wrong exporter would have it."""
    original = bundle.write

    def wrong_write(path: Path, **arrays: object) -> bundle.Bundle:
        arrays["weight"] = arrays["weight"] * np.float32(1.01)  # type: ignore[operator]
        return original(path, **arrays)  # type: ignore[arg-type]

    monkeypatch.setattr(exporting.bundle, "write", wrong_write)
    with pytest.raises(ParityFailed, match="log-probabilities differ"):
        export(finished, tmp_path / "models" / "small" / "1")
    assert list((tmp_path / "models" / "small").iterdir()) == []


def test_swapped_classes_are_refused(finished: Path, tmp_path: Path) -> None:
    written = export(finished, tmp_path / "1")
    layer = run_folder.load_layer(finished)
    hidden = np.load(finished / run_folder.HIDDEN)
    check_parity(layer, Engine(written), hidden)
    swapped = with_classes(written, lambda classes: classes[::-1])
    with pytest.raises(ParityFailed, match="classes differ"):
        check_parity(layer, Engine(swapped), hidden)


def test_a_wrong_first_class_alone_is_refused(finished: Path, tmp_path: Path) -> None:
    """Seen at k = 1 already: log-probabilities all right, the class of the only answer wrong."""
    written = export(finished, tmp_path / "1")
    engine = Engine(with_classes(written, lambda classes: np.roll(classes, 1)))
    with pytest.raises(ParityFailed, match=r"classes differ .* at k=1, experts=1"):
        check_parity(run_folder.load_layer(finished), engine, np.load(finished / run_folder.HIDDEN))


def test_refusals(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(run_folder.RunMissing):
        export(tmp_path / "nothing", tmp_path / "1")
    unfinished = Path(shutil.copytree(finished, tmp_path / "unfinished"))
    (unfinished / run_folder.SUMMARY).unlink()
    with pytest.raises(run_folder.RunUnfinished):
        export(unfinished, tmp_path / "1")
    few = tmp_path / "few.txt"
    few.write_text("one\ntwo\n")
    with pytest.raises(LabelsWrong):
        export(finished, tmp_path / "1", labels=few)
    with pytest.raises(LabelsWrong):
        export(finished, tmp_path / "1", labels=tmp_path / "none.txt")
    assert not (tmp_path / "1").exists()
    export(finished, tmp_path / "1")
    with pytest.raises(BundleExists):
        export(finished, tmp_path / "1")


def test_labels_of_ones_own(finished: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("\n".join(f"name {i}" for i in range(12)) + "\n")
    assert export(finished, tmp_path / "1", labels=names).labels == tuple(
        f"name {i}" for i in range(12)
    )


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_other_precisions_are_checked_as_well(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Precision
) -> None:
    written = export(finished, tmp_path / "1", precision=precision)
    assert written.manifest.precision == precision
    original = bundle.write

    def wrong_write(path: Path, **arrays: object) -> bundle.Bundle:
        arrays["weight"] = arrays["weight"] * np.float32(1.2)  # type: ignore[operator]
        return original(path, **arrays)  # type: ignore[arg-type]

    monkeypatch.setattr(exporting.bundle, "write", wrong_write)
    with pytest.raises(ParityFailed):
        export(finished, tmp_path / "2", precision=precision)
    assert not (tmp_path / "2").exists()


def test_int8_that_changes_answers_is_refused(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the best by int8 were others: nothing exact is left to choose from."""
    monkeypatch.setattr(parity, "INT8_AGREEMENT", 1.1)
    with pytest.raises(ParityFailed, match=r"100\.00% of the rows"):
        export(finished, tmp_path / "1", precision="int8")
