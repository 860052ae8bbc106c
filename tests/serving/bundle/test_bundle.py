"""What is written is read, whole or not at all."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers.paths import DEMO
from helpers.tiny_bundle import N_CLASSES, SIZES, WIDTH, write_tiny
from onnx import numpy_helper

from service import bundle, errors
from service.bundle import graphs
from service.bundle import labels as class_labels
from service.bundle.format import MANIFEST


def test_what_is_written_is_read(tiny: bundle.Bundle) -> None:
    found = bundle.read(tiny.path)
    assert found.manifest == tiny.manifest
    assert found.manifest.expert_sizes == list(SIZES)
    assert found.classes.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 10, 11]
    assert found.offsets.tolist() == [0, 5, 9, 13]
    assert found.labels is not None and found.labels[3] == "class 3"
    assert found.samples is not None and found.samples.shape == (2, WIDTH)
    onnx.checker.check_model(onnx.load_model_from_string(found.gate_model), full_check=True)


def test_the_same_layer_gives_the_same_files(tmp_path: Path) -> None:
    first, second = (write_tiny(tmp_path / name) for name in ("1", "2"))
    assert first.manifest.files == second.manifest.files


def test_plain_graphs_are_as_they_always_were() -> None:
    """Byte for byte those of the committed bundle, which has no bias and no preview."""
    demo = bundle.read(DEMO)
    assert demo.manifest.n_experts > 0
    for name, graph in [("U", demo.gate_model), *(("W", model) for model in demo.expert_models)]:
        assert graph is not None
        tensors = onnx.load_model_from_string(graph).graph.initializer
        weight = numpy_helper.to_array(next(t for t in tensors if t.name == name))
        if name == "U":
            assert graphs.gate_graph(weight) == graph
        else:
            assert graphs.expert_graph(weight, demo.manifest.n_classes) == graph


def test_an_expert_that_scores_all_its_classes_costs_as_many(tiny: bundle.Bundle) -> None:
    assert tiny.previews == (None, None, None)
    assert tiny.expert_costs == SIZES
    assert tiny.expert_cost(0, k=3) == SIZES[0]


def test_an_expert_without_classes_has_no_file(tmp_path: Path) -> None:
    written = bundle.write(
        tmp_path / "1",
        gate=np.eye(2, dtype=np.float32),
        weight=np.ones((3, 2), np.float32),
        offsets=np.array([0, 0, 3]),
        classes=np.arange(3, dtype=np.int32),
        n_classes=3,
        training=bundle.TrainingFacts(utilization=[0, 1], flops_speedup=0.6),
    )
    assert written.expert_models[0] is None
    assert not (tmp_path / "1" / "experts" / "000.onnx").exists()
    assert written.labels is None and written.samples is None


def test_the_manifest_is_written_last_and_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def failing_rename(self: Path, _: Path) -> None:
        seen.append((self / MANIFEST).exists())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(OSError, match="No space"):
        write_tiny(tmp_path / "1")
    assert seen == [True]
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_is_never_overwritten(tiny: bundle.Bundle) -> None:
    before = (tiny.path / MANIFEST).read_bytes()
    with pytest.raises(errors.BundleExists):
        write_tiny(tiny.path)
    assert (tiny.path / MANIFEST).read_bytes() == before


def test_the_papers_speedup_formula() -> None:
    # 100 classes, two experts of 10 and 40 used 3:1, K = 2: 100 / (7.5 + 10 + 2)
    assert bundle.flops_speedup(100, [10, 40], [0.75, 0.25]) == pytest.approx(100 / 19.5)


@pytest.mark.parametrize("labels", [["a"] * 11, ["a\nb"] + ["a"] * 11])
def test_labels_that_cannot_be_written(labels: list[str]) -> None:
    with pytest.raises(errors.LabelsWrong):
        class_labels.encode(labels, N_CLASSES)
